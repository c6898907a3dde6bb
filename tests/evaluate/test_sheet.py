"""The contact sheet: a PNG of the promised size, green where right and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clipscale.errors import ConfigError
from clipscale.evaluate.sheet import CELL_HEIGHT, CELL_WIDTH, COLUMNS, DPI, HEADER, MARGIN, contact_sheet

pytest.importorskip("matplotlib")
NAMES = ["cat", "ant", "dog", "cow", "eel"]


def draw(out: Path, truths: list[str], top: list[list[str]] | None = None) -> np.ndarray:
    """A sheet of grey images; returns its pixels as [height, width, 3]."""
    images = torch.full((len(truths), 3, 16, 16), 128, dtype=torch.uint8)
    top = top or [NAMES] * len(truths)
    contact_sheet(images, truths, top, [[0.5 - at / 10 for at in range(len(row))] for row in top], out, "A title")
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB")).astype(int)


def greens(pixels: np.ndarray) -> np.ndarray:
    red, green, blue = np.moveaxis(pixels, -1, 0)
    return green - np.maximum(red, blue) > 30


def cell(pixels: np.ndarray, index: int) -> np.ndarray:
    """The part of a page, or of a mask over it, that belongs to one image."""
    row, column = divmod(index, COLUMNS)
    top, left = (HEADER + row * CELL_HEIGHT) * DPI, (MARGIN + column * CELL_WIDTH) * DPI
    pad = 4  # half the frame's line lies outside
    return pixels[round(top) : round(top + CELL_HEIGHT * DPI), round(left) - pad : round(left + CELL_WIDTH * DPI) - pad]


def test_green_marks_the_right_names_only(tmp_path: Path):
    truths = ["bat"] * 4 + ["bat", "ant", "bat", "cat"]  # image 5 right at second guess, image 7 at first
    marked = greens(draw(tmp_path / "sheet.png", truths))
    found = [int(cell(marked, index).sum()) for index in range(8)]
    assert [index for index, count in enumerate(found) if count] == [5, 7]
    assert sum(found) == marked.sum()
    assert found[7] > 2 * found[5]  # the frame around the picture


def test_no_green_where_nothing_is_right(tmp_path: Path):
    pixels = draw(tmp_path / "sheet.png", ["bat", "owl"])
    assert not greens(pixels).any()
    assert cell(pixels, 0).min() < 60  # ink and picture are there
    assert cell(pixels, 2).min() == 255  # the places of the row that stay empty


@pytest.mark.parametrize(("num_images", "num_rows"), [(1, 1), (4, 1), (5, 2), (24, 6)])
def test_the_page_grows_by_rows(tmp_path: Path, num_images: int, num_rows: int):
    pixels = draw(tmp_path / "new" / "sheet.png", ["bat"] * num_images)
    assert pixels.shape == (pytest.approx((HEADER + num_rows * CELL_HEIGHT) * DPI, abs=1), 1740, 3)


def test_hard_names_stay_in_their_cell(tmp_path: Path):
    long = "woman and man " * 20
    pixels = draw(tmp_path / "sheet.png", [long, "bat"], [[long, "$5 and $6", "日本", "$^$", "line\nbreak"], ["cat"]])
    gutter = cell(pixels, 0)[:, -round(0.25 * DPI) :]
    assert gutter.min() == 255
    assert greens(cell(pixels, 0)).any()


def test_a_missing_matplotlib_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r'pip install "clipscale\[demo\]"'):
        draw(tmp_path / "sheet.png", ["bat"])


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the contact sheet"):
        draw(tmp_path / "file" / "sheet.png", ["bat"])
