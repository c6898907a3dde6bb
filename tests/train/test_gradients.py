"""The gradient of every parameter, as each engine applies it, against autograd on the undivided batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.helpers.ranks import run_ranks
from tests.train.problem import NUM_PAIRS, Answer, Case, assert_equal, autograd, measure_all

STAGES = ["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3"]


def cut(engine: str = "plain", image_chunk: int = 5, text_chunk: int = 3, **options: object) -> Case:
    return Case(engine, image_chunk, text_chunk, **options)  # pyright: ignore[reportArgumentType]


def cases(size: int) -> list[Case]:
    rank_pairs = NUM_PAIRS // size
    ragged = cut(image_chunk=rank_pairs - 1, text_chunk=rank_pairs // 2 + 1)
    if size == 4:
        hybrid = [
            cut("hpZ-2", 3),
            cut("hsdp-1", 3),
            cut("hsdp-2", 3, keep_image_graphs=1, clip_norm=0.1),
            cut("hsdp-4", 3),
        ]
        return [ragged, cut("ZeRO-2", 3), cut("ZeRO-3", 3, keep_image_graphs=1), cut(loss="sigmoid"), *hybrid]
    chunks = [
        Case(),
        cut(image_chunk=1, text_chunk=rank_pairs),
        cut(image_chunk=rank_pairs, text_chunk=1),
        cut(),
        ragged,
    ]
    engines = [cut(engine, image_chunk=3) for engine in (*STAGES, f"hsdp-{size}")]
    if size == 1:
        return chunks + engines + dropping(chunks)
    keeping = [
        cut(engine, 3, 3, keep_image_graphs=2, keep_text_graphs=1, clip_norm=0.1)
        for engine in ("plain", *STAGES, "hpZ-2", "hsdp-1", "hsdp-2")
    ]
    kinds = [cut(loss="sigmoid"), cut("ZeRO-2", 3, 3, loss="sigmoid"), cut(activation_checkpointing=True)]
    kinds += [cut(engine, 3, activation_checkpointing=True) for engine in ("ZeRO-3", "hsdp-2")]
    return chunks + keeping + kinds + dropping([cut(), *engines, keeping[0], keeping[-1], kinds[-1]])


def dropping(cases: list[Case]) -> list[Case]:
    return [replace(case, patch_dropout=0.5) for case in cases]


def answer_for(case: Case, size: int) -> Answer:
    """The oracle knows nothing of engines, and of chunks only what random numbers need."""
    chunk = case.image_chunk if case.patch_dropout else NUM_PAIRS
    return oracle(chunk, case.loss, case.patch_dropout, case.clip_norm, size if case.patch_dropout else 1)


@cache
def oracle(chunk: int, loss: str, patch_dropout: float, clip_norm: float, size: int) -> Answer:
    case = Case(image_chunk=chunk, loss=loss, patch_dropout=patch_dropout, clip_norm=clip_norm)
    return autograd(case, size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradients_equal_autograd(size: int) -> None:
    problems = cases(size)
    faults = []
    for rank, answers in enumerate(run_ranks(size, measure_all, problems, timeout_s=120)):
        for case, found in zip(problems, answers, strict=True):
            try:
                assert_equal(found, answer_for(case, size))
            except AssertionError as error:
                faults.append(f"rank {rank}, {case}: {error}")
    assert not faults, "\n".join(faults)


PLANTS = {
    "no world factor": [cut(), cut("ZeRO-2", 3)],
    "scale gradient once per chunk": [cut()],
    "random state not restored": [cut(patch_dropout=0.5), cut("ZeRO-3", patch_dropout=0.5)],
    "every chunk a boundary": [cut("ZeRO-2", 3)],
    "boundary never set": [cut("ZeRO-2", 3)],
    "old gradients stay in stage 3": [cut("ZeRO-3", 3)],
    "DeepSpeed's own clipping": [cut("ZeRO-1", 3)],
    "groups never meet": [cut("hsdp-1", 3)],
    "no averaging over ranks": [cut()],
    "features in the order of chunks": [cut()],
}


def test_teeth_every_planted_fault_is_seen() -> None:
    problems = [replace(case, bug=bug) for bug, bitten in PLANTS.items() for case in bitten]
    answers = run_ranks(2, measure_all, problems, timeout_s=120)[0]
    pairs = zip(problems, answers, strict=True)
    unseen = [case for case, found in pairs if is_equal(found, answer_for(case, 2))]
    assert not unseen


def is_equal(found: Answer, wanted: Answer) -> bool:
    try:
        assert_equal(found, wanted)
    except AssertionError:
        return False
    return True
