"""The contact sheet: test images with their best names on one page, the right ones marked."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtyping import UInt8
from torch import Tensor

from clipscale.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4
DPI = 120
# All lengths in inches.
CELL_WIDTH, CELL_HEIGHT = 3.5, 1.62
MARGIN, HEADER = 0.3, 0.95
PICTURE = 1.1
GAP = 0.1  # picture to ticks
INK, PALE, HAIRLINE, GREEN = "#1f2328", "#6e7781", "#d8dee4", "#1a7f37"
TRUTH_PT, NAME_PT, SCORE_PT = 9.0, 8.0, 6.5


def contact_sheet(
    images: UInt8[Tensor, "n 3 h w"],
    truths: Sequence[str],
    top_names: Sequence[Sequence[str]],
    scores: Sequence[Sequence[float]],
    out: Path,
    title: str,
) -> None:
    """Draw n images, four in a row, each under its true name and beside its best names (best first) with their scores.

    The right name is green, bold and ticked; an image whose first name is right has a green frame. Names too long for
    their place end in an ellipsis. `out` is a PNG of 1740 px width; its folder is made when missing.

    Raises ConfigError when matplotlib is not installed or `out` cannot be written.
    """
    assert len(images) == len(truths) == len(top_names) == len(scores) > 0
    figure = _blank_page(-(-len(images) // COLUMNS))
    _draw_header(figure, title, _summary(truths, top_names))
    for index, image in enumerate(images.cpu()):
        row, column = divmod(index, COLUMNS)
        left, top = MARGIN + column * CELL_WIDTH, HEADER + row * CELL_HEIGHT
        right = [name == truths[index] for name in top_names[index]]
        _write(figure, left, top + 0.1, truths[index], CELL_WIDTH - MARGIN, size=TRUTH_PT, weight="bold")
        _draw_picture(figure, left, top + 0.2, image, framed=bool(right) and right[0])
        _list_names(figure, left + PICTURE + GAP, top + 0.2, top_names[index], scores[index], right)
    _save(figure, out)


def _blank_page(num_rows: int) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f'the contact sheet needs matplotlib ({error}): pip install "clipscale[demo]"') from error
    # The figure and its canvas alone: pyplot would keep the figure in a global list and look for a display.
    size = (2 * MARGIN + COLUMNS * CELL_WIDTH - 0.1, HEADER + num_rows * CELL_HEIGHT)
    figure = Figure(figsize=size, dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _draw_header(figure: Figure, title: str, summary: str) -> None:
    width = COLUMNS * CELL_WIDTH
    _write(figure, MARGIN, 0.42, title, width, size=15.0, weight="bold")
    _write(figure, MARGIN, 0.63, summary, width, size=9.0, color=PALE)


def _summary(truths: Sequence[str], top_names: Sequence[Sequence[str]]) -> str:
    first = sum(truth in names[:1] for truth, names in zip(truths, top_names, strict=True))
    listed = sum(truth in names for truth, names in zip(truths, top_names, strict=True))
    return f"of these {len(truths)} images, {first} right at first guess and {listed} among the names listed"


def _draw_picture(figure: Figure, left: float, top: float, image: UInt8[Tensor, "3 h w"], *, framed: bool) -> None:
    width, height = figure.get_size_inches()
    box = (left / width, 1 - (top + PICTURE) / height, PICTURE / width, PICTURE / height)
    axes = figure.add_axes(box, xticks=[], yticks=[])
    # Test images are small: smooth enlargement, since hard pixels would hide what they show.
    axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="bicubic", aspect="auto")
    for spine in axes.spines.values():
        spine.set(color=GREEN if framed else HAIRLINE, linewidth=1.8 if framed else 0.8)


def _list_names(
    figure: Figure, left: float, top: float, names: Sequence[str], scores: Sequence[float], right: Sequence[bool]
) -> None:
    """Names below each other, each with a column for the tick before it and its score, small, at the cell's end."""
    tick, score_end = left + 0.15, left + CELL_WIDTH - MARGIN - PICTURE - GAP
    pitch = PICTURE / max(5, len(names))
    for place, (name, score, is_right) in enumerate(zip(names, scores, right, strict=True)):
        base = top + (place + 0.65) * pitch
        if is_right:
            _write(figure, left, base, "✓", tick, size=NAME_PT, color=GREEN, weight="bold")
        style = {"color": GREEN, "weight": "bold"} if is_right else {"color": INK, "weight": "normal"}
        _write(figure, tick, base, name, score_end - tick - 0.33, size=NAME_PT, **style)
        _write(figure, score_end, base, f"{score:.2f}", 0.4, size=SCORE_PT, color=PALE, align="right")


def _write(
    figure: Figure,
    x: float,
    baseline: float,
    text: str,
    width: float,
    *,
    size: float,
    color: str = INK,
    weight: str = "normal",
    align: str = "left",
) -> None:
    """Write one line at (x, baseline) from the top left corner, cut with an ellipsis where it is wider than `width`."""
    artist = figure.text(
        x,
        figure.get_figheight() - baseline,
        "",
        transform=figure.dpi_scale_trans,
        fontfamily="DejaVu Sans",  # comes with matplotlib, so the page looks the same everywhere
        fontsize=size,
        fontweight=weight,
        color=color,
        horizontalalignment=align,
        verticalalignment="baseline",
        parse_math=False,  # a name may hold dollar signs
    )
    line = " ".join(text.split())

    def fits(shown: str) -> bool:
        artist.set_text(shown)
        return bool(artist.get_window_extent().width <= width * DPI)

    shown, kept = line, len(line)
    with _missing_glyphs_allowed():
        while not fits(shown) and kept > 1:
            kept -= 1
            shown = line[:kept].rstrip(" ,:;-") + "…"


def _save(figure: Figure, out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _missing_glyphs_allowed():
            figure.savefig(out, format="png", dpi=DPI)
    except OSError as error:
        raise ConfigError(f"cannot write the contact sheet {out}: {error.strerror or error}") from error


@contextmanager
def _missing_glyphs_allowed() -> Iterator[None]:
    """Names in scripts that the font lacks show as boxes: worth a page with boxes, not a warning for each glyph."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        yield
