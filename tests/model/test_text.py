"""Captions to ids, and the trimming of what no feature depends on."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from clipscale.config.schema import SoftmaxLoss
from clipscale.data.write import write_token_table
from clipscale.errors import ConfigError, DataError
from clipscale.loss.cache import cut_texts
from clipscale.model.towers import Tokenize, Towers, build_towers, clip_token_ids, read_token_ids, resolve_architecture

from .architectures import CAPTIONS, TEXT, small

SOFTMAX = SoftmaxLoss("softmax")
END, START = 49407, 49406
LONG = "a very long caption of many words " * 20


def double(**text: object) -> Towers:
    """In float64, with weights that are far from their tame start."""
    torch.manual_seed(1)
    towers, _ = build_towers(small(text_cfg=TEXT | text), SOFTMAX)
    with torch.no_grad():
        for parameter in towers.text.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return towers.double()


def tokens() -> torch.Tensor:
    model = small()
    return Tokenize(model, resolve_architecture(model))([*CAPTIONS, LONG])


@pytest.mark.parametrize("text", [{}, {"pool_type": "eos", "eos_id": END}, {"layers": 1, "ls_init_value": 0.1}])
def test_trimming_is_exact_under_a_causal_mask(text: dict[str, object]) -> None:
    towers = double(**text)
    ids = tokens()
    lengths = towers.text_lengths(ids)
    assert lengths.tolist() == [5, 12, 2, 4, 9, 24]
    with torch.no_grad():
        whole = towers._read(ids)
        for chunk in (1, 2, 4, 6):
            for part in cut_texts(ids, lengths, chunk):
                assert part.inputs.shape[1] == lengths[part.rows].max()
                torch.testing.assert_close(towers._read(part.inputs), whole[part.rows], rtol=1e-12, atol=1e-12)


def test_the_mask_is_whole_again_after_a_trimmed_pass() -> None:
    towers = double()
    with torch.no_grad():
        before = towers._read(tokens())
        towers._read(tokens()[:, :24][:5, :12])
        assert towers.text.attn_mask.shape == (24, 24)
        assert torch.equal(towers._read(tokens()), before)


@pytest.mark.parametrize("text", [{"no_causal_mask": True}, {"embed_cls": True}, {"pool_type": "last"}])
def test_towers_that_look_further_are_not_trimmed(text: dict[str, object]) -> None:
    towers = double(**text)
    ids = tokens()
    assert towers.text_lengths(ids).tolist() == [24] * len(ids)
    assert {part.inputs.shape[1] for part in cut_texts(ids, towers.text_lengths(ids), 2)} == {24}


def test_teeth_without_a_causal_mask_trimming_would_be_wrong() -> None:
    towers = double(no_causal_mask=True)
    ids = tokens()[:1]
    with torch.no_grad():
        apart = (towers._read(ids) - towers.text(ids[:, :5])).abs().max()
    assert apart > 1e-3


# ---- ids --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context_length", [5, 24, 77])
def test_exactly_one_end_and_nothing_behind_it(context_length: int) -> None:
    model = small(text_cfg=TEXT | {"context_length": context_length})
    ids = Tokenize(model, resolve_architecture(model))([*CAPTIONS, LONG])
    assert ids.shape == (6, context_length)
    assert (ids[:, 0] == START).all()
    assert ((ids == END).sum(dim=1) == 1).all()
    ends = (ids == END).int().argmax(dim=1)
    for row, end in zip(ids, ends.tolist(), strict=True):
        assert (row[end + 1 :] == 0).all()
        assert (row[:end] != 0).all()
    assert ends[-1] == context_length - 1  # the long one is cut, and still ends
    assert ids[2].tolist()[:3] == [START, END, 0]


def test_ids_are_clips_own() -> None:
    model = small()
    ids = Tokenize(model, resolve_architecture(model))(["a red circle"])[0].tolist()
    assert ids[:5] == [START, *clip_token_ids("a red circle"), END]
    assert clip_token_ids("a red circle") == [320, 736, 7117]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    write_token_table(tmp_path / "tokens.json", [*CAPTIONS, LONG], clip_token_ids)
    return tmp_path / "tokens.json"


def test_a_cut_table_gives_the_features_of_the_whole_one(table: Path) -> None:
    whole_model, cut_model = small(), small(token_ids=str(table))
    torch.manual_seed(0)
    whole, architecture = build_towers(whole_model, SOFTMAX)
    cut, cut_architecture = build_towers(cut_model, SOFTMAX)
    rows = read_token_ids(table)
    assert cut_architecture == architecture  # what is exported is the whole table
    weights = whole.state_dict()
    weights["text.token_embedding.weight"] = weights["text.token_embedding.weight"][rows]
    cut.load_state_dict(weights)
    captions = [*CAPTIONS, LONG]
    long_ids, short_ids = (Tokenize(model, architecture)(captions) for model in (whole_model, cut_model))
    assert short_ids.max() == len(rows) - 1
    assert torch.equal(torch.tensor(rows)[short_ids], long_ids)
    assert torch.equal(whole.text_lengths(long_ids), cut.text_lengths(short_ids))
    with torch.no_grad():
        assert torch.equal(whole("text", long_ids)[0], cut("text", short_ids)[0])


def test_a_word_outside_the_table_is_a_fault_of_the_data(table: Path) -> None:
    tokenize = Tokenize(small(token_ids=str(table)), resolve_architecture(small()))
    with pytest.raises(DataError, match=r"caption 'a zebra' needs token \d+, which model.token_ids leaves out"):
        tokenize(["a red circle", "a zebra"])


@pytest.mark.parametrize("cut", [False, True])
def test_it_travels_to_loader_workers(cut: bool, table: Path) -> None:
    model = small(token_ids=str(table)) if cut else small()
    tokenize = Tokenize(model, resolve_architecture(model))
    before = tokenize(CAPTIONS)
    again = pickle.loads(pickle.dumps(tokenize))
    assert torch.equal(again(CAPTIONS), before)
    assert again.context_length == 24


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "no file at"),
        ("[0, 1", "is not JSON"),
        ("{}", "must hold a list of integers"),
        ('[0, "a", 49407]', "must hold a list of integers"),
        ("[]", "must run from 0"),
        ("[1, 49407]", "must run from 0"),
        ("[0, 49406]", "must run from 0"),
        ("[0, 49407, 49408]", "must run from 0"),
    ],
)
def test_bad_tables(content: str | None, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=fault):
        read_token_ids(path)


def test_a_table_is_sorted_and_freed_of_repetitions(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps([5, 49407, 0, 5, 3]))
    assert read_token_ids(path) == [0, 3, 5, 49407]


def test_a_tokenizer_that_cannot_be_had() -> None:
    model = small(text_cfg=TEXT | {"hf_tokenizer_name": "nobody/nothing"})
    with pytest.raises(ConfigError, match="the tokenizer 'nobody/nothing' cannot be loaded"):
        Tokenize(model, resolve_architecture(model))
