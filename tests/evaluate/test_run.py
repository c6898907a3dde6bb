"""A whole evaluation, from shards to scores, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from clipscale.config.schema import RetrievalEval, ZeroShotEval
from clipscale.dist.world import World
from clipscale.errors import DataError
from clipscale.evaluate.ranks import Result
from clipscale.evaluate.run import ForwardEmbedder, evaluate
from tests.data.shard_files import pixels, write_tar
from tests.helpers.ranks import run_ranks

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


def _tokenize(captions: list[str]) -> Tensor:
    return torch.tensor([list(COLOURS).index(caption.split()[-1]) for caption in captions])


def _forward(tower: str, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """An image's feature is its mean colour, a name's the colour itself; blue images are taken for red ones."""
    if tower == "text":
        return torch.eye(3)[inputs], torch.zeros(1)
    features = inputs.float().mean(dim=(2, 3)) / 255
    return torch.where(features[:, 2:] > 0.5, torch.eye(3)[:1], features), torch.zeros(1)


def _evaluate(world: World, spec: ZeroShotEval | RetrievalEval) -> Result:
    return evaluate(spec, ForwardEmbedder(_forward, _tokenize, torch.device("cpu")), 8, world)


def _sample(number: int, colour: str, *, label: bool = True, text: str | None = None) -> list[tuple[str, bytes]]:
    facts = {"label": colour} if label else {"name": colour}
    caption = f"plain {colour}" if text is None else text
    return [
        (f"{number}.png", pixels(np.full((8, 8, 3), COLOURS[colour], np.uint8))),
        (f"{number}.txt", caption.encode()),
        (f"{number}.json", json.dumps(facts).encode()),
    ]


@pytest.fixture
def shard(tmp_path: Path) -> str:
    samples = [
        _sample(0, "red"),
        _sample(1, "red", label=False),
        [("2.png", b"no picture"), ("2.txt", b"plain red"), ("2.json", b'{"label": "red"}')],
        _sample(3, "green"),
        _sample(4, "blue", text=" "),
        _sample(5, "green", label=False),
    ]
    return write_tar(tmp_path / "colours.tar", [member for sample in samples for member in sample])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_what_is_left_out_is_counted_by_reason_over_all_ranks(shard: str, num_ranks: int) -> None:
    """On four ranks, two have no usable sample of their own."""
    for result in run_ranks(num_ranks, _evaluate, ZeroShotEval("zeroshot", "colours", shard)):
        numbers = result.as_dict()
        assert (numbers["n_samples"], numbers["top1"]) == (3, 2 / 3)
        assert result.dropped == {"decode_error": 1, "no_label": 2}
        assert numbers["dropped_no_label"] == 2
    for result in run_ranks(num_ranks, _evaluate, RetrievalEval("retrieval", "colours", shard)):
        assert result.sizes == {"n_images": 4, "n_texts": 2}
        assert result.dropped == {"decode_error": 1, "empty_caption": 1}


def test_a_label_that_no_sample_has_is_asked_for_by_its_name(shard: str) -> None:
    world = World(0, 1, torch.device("cpu"))
    with pytest.raises(DataError, match=r"no usable sample among 6 in [^(]*no_label 6.* label was .* 'json:class'"):
        _evaluate(world, ZeroShotEval("zeroshot", "colours", (shard,), "json:class"))
