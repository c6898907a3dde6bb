"""Templates, class names and class features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipscale.errors import ConfigError, DataError
from clipscale.evaluate.prompts import TEMPLATE_SETS, collect_classes, embed_classes, load_class_names, load_templates


class Letters:
    """Embeds a text as its letter counts, not of unit length, and remembers how many it was given at a time."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def embed_images(self, images: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def embed_texts(self, texts: list[str]) -> torch.Tensor:
        self.calls.append(texts)
        return torch.tensor([[float(text.count(letter)) for letter in "abc{} "] + [1.0] for text in texts])


def test_the_sets_hold_the_name_once():
    assert load_templates("none") == ("{}",)
    for name, templates in TEMPLATE_SETS.items():
        assert load_templates(name) == templates
        assert all(template.count("{}") == 1 for template in templates)


def test_a_file_of_templates(tmp_path: Path):
    file = tmp_path / "own.txt"
    file.write_bytes("\ufeffa {} drawn\r\n\r\n  {}, emoji  \n".encode())
    assert load_templates(str(file)) == ("a {} drawn", "{}, emoji")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a {}\n\na photo\n", r"line 3: 'a photo' holds \{\} 0 times"),
        (b"{} and {}\n", r"line 1: .* holds \{\} 2 times"),
        (b"\n \n", "empty"),
        (b"caf\xe9 {}", "not UTF-8"),
    ],
)
def test_a_broken_template_file_is_refused(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "own.txt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_templates(str(file))


def test_an_unknown_set_is_refused_with_the_nearest(tmp_path: Path):
    with pytest.raises(ConfigError, match="did you mean 'simple'"):
        load_templates("simpel")
    with pytest.raises(ConfigError, match=r"neither a set .* nor a file"):
        load_templates(str(tmp_path))


def test_classes_from_the_labels():
    names, indices = collect_classes(["dog", "cat", "dog", "ant"])
    assert names == ("ant", "cat", "dog")
    assert indices.tolist() == [2, 1, 2, 0]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.text(max_size=3), min_size=1))
def test_indices_point_back_to_the_labels(labels: list[str]):
    names, indices = collect_classes(labels)
    assert [names[at] for at in indices.tolist()] == labels
    assert list(names) == sorted(set(labels))


def test_given_names_keep_their_order_and_may_be_more_than_the_labels():
    names, indices = collect_classes(["cat", "ant"], ["zebra", "cat", "ant"])
    assert names == ("zebra", "cat", "ant")
    assert indices.tolist() == [1, 2]


def test_labels_beyond_the_names_are_shown():
    with pytest.raises(ConfigError, match=r"4 labels .* 2 class names: 'Zebra' \(did you mean 'zebra'\?\).*and 1 more"):
        collect_classes(["cat", "Zebra", "x1", "x2", "x3"], ["zebra", "cat"])
    with pytest.raises(DataError, match="no sample has a label"):
        collect_classes([])


def test_a_file_of_class_names(tmp_path: Path):
    file = tmp_path / "names.txt"
    file.write_text("zebra\nred apple \n\ncafé\n", encoding="utf-8")
    assert load_class_names(file) == ("zebra", "red apple", "café")
    file.write_text("cat\nant\ncat\n")
    with pytest.raises(ConfigError, match="line 3: the class name 'cat' stands in line 1"):
        load_class_names(file)
    with pytest.raises(ConfigError, match="No such file"):
        load_class_names(tmp_path / "absent.txt")


@pytest.mark.parametrize("text_chunk", [1, 2, 5, 256])
def test_a_class_is_the_normalised_mean_of_normalised_prompts(text_chunk: int):
    names, templates = ["abba", "c {x}", "cab"], ("{}", "a {b} {}")
    embedder = Letters()
    features = embed_classes(embedder, names, templates, text_chunk=text_chunk)
    for name, feature in zip(names, features, strict=True):
        rows = Letters().embed_texts([name, "a {b} " + name]).double()
        mean = (rows / rows.norm(dim=1, keepdim=True)).mean(dim=0)
        assert torch.allclose(feature.double(), mean / mean.norm(), atol=1e-6)
    assert max(map(len, embedder.calls)) <= max(text_chunk, len(templates))
