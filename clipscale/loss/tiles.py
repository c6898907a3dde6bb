"""What both losses share: the logits of the global batch in tiles, and the sums over ranks at the end.

A rank needs the logits of its own images against all texts, and of its own texts against all images. The square where
both are its own is the same for both sides, so its tiles serve both: with one rank that is the whole matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isqrt

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from clipscale.dist.world import World
from clipscale.loss.gather import Batch

IMAGE, TEXT = 0, 1  # the two sides of a pair; the other side of `side` is `1 - side`
DEFAULT_BUDGET_BYTES = 256 * 2**20
_CPU_TILE_ELEMENTS = 2**20  # 4 MB of float32: large enough for two threads to share, small enough for the cache
_BUFFERS = 4  # logits and weights, and as much again for temporaries inside torch.logsumexp


@dataclass(frozen=True)
class LossGradients:
    """The loss of the global batch and its gradient. No factor for the number of ranks is anywhere in it."""

    loss: Float[Tensor, ""]  # the same on every rank
    d_image: Float[Tensor, "n d"]  # of the global loss by this rank's own features, complete
    d_text: Float[Tensor, "n d"]
    d_log_scale: Float[Tensor, ""]  # over the global batch, the same on every rank
    d_bias: Float[Tensor, ""] | None = None  # sigmoid loss only; global like d_log_scale


@dataclass(frozen=True)
class Tile:
    """A rectangle of pairs: own rows of one side run down, anybody's rows of the other side run across."""

    side: int  # IMAGE: images down, texts across; TEXT: the other way round
    left: Float[Tensor, "h d"]  # features down
    right: Float[Tensor, "w d"]  # features across
    down: slice  # global positions of both
    across: slice
    rows: slice  # positions down among this rank's own rows
    cols: slice | None  # positions across among them, where these are own too: the tile then serves both sides

    def true_pairs(self, x: Float[Tensor, "h w"]) -> Float[Tensor, " k"]:
        """A view of the entries of `x`, a tensor of this tile's shape, that belong to true pairs: often none."""
        return x.diagonal(self.down.start - self.across.start)

    def views(self, x: Float[Tensor, "h w"]) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """`x` as seen from each side it serves: the side, its own rows, x with these down, the features across."""
        yield self.side, self.rows, x, self.right
        if self.cols is not None:
            yield 1 - self.side, self.cols, x.T, self.left


def tile_shape(num_rows: int, num_cols: int, elements: int) -> tuple[int, int]:
    """Height and width, about 1 to 2, of tiles for a matrix, with at most `elements` each (but at least one)."""
    height = max(1, min(num_rows, isqrt(elements // 2)))
    width = max(1, min(num_cols, elements // height))
    return max(1, min(num_rows, elements // width)), width


def _spans(stop: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, stop)) for start in range(0, stop, step))


def _moved(span: slice, by: int) -> slice:
    return slice(span.start + by, span.stop + by)


class LogitTiles:
    """The logits z = s * left . right that this rank needs, as pairs of a tile and its z [h, w].

    Every iteration yields the same tiles in the same order, and communicates where `batch` is a ring. Under `keep`,
    where all logits fit half the budget, a second iteration finds those of the first, which may then be used up (the
    dense path). Otherwise all tiles share one buffer, and z is valid until the next tile. `prepare` changes fresh
    logits in place. Pairs of different samples with equal `concepts` have a logit of -inf.
    """

    def __init__(
        self,
        batch: Batch,
        scale: Float[Tensor, ""],
        *,
        budget_bytes: int,
        keep: bool,
        prepare: Callable[[Tensor], object] | None,
        concepts: Int[Tensor, " total"] | None,
    ) -> None:
        self.own, self._others = batch.own, batch.others
        self._scale, self._prepare, self._concepts = scale, prepare, concepts
        image = batch.own.image
        n, total = len(image), sum(batch.rows)
        elements = budget_bytes // (_BUFFERS * image.element_size())
        if image.device.type == "cpu":
            elements = min(elements, _CPU_TILE_ELEMENTS)
        self._height, self._width = tile_shape(n, total, elements)
        self._dense = keep and n * (2 * total - n) * image.element_size() <= budget_bytes // 2
        self._kept: list[Tensor] = []
        self._z, self._scratch = (image.new_empty(self._height * self._width) for _ in range(2))

    def scratch(self, z: Float[Tensor, "h w"]) -> Float[Tensor, "h w"]:
        """Uninitialised working memory in the shape of z, valid until the next call."""
        return self._scratch[: z.numel()].view_as(z)

    def __iter__(self) -> Iterator[tuple[Tile, Tensor]]:
        kept = iter(tuple(self._kept))
        for side, left, right, start in self._rectangles():
            for rows in _spans(len(left), self._height):
                scaled = left[rows] * self._scale
                for cols in _spans(len(right), self._width):
                    down, across = _moved(rows, self.own.start), _moved(cols, start)
                    own_cols = cols if start == self.own.start else None
                    tile = Tile(side, left[rows], right[cols], down, across, rows, own_cols)
                    z = next(kept, None)
                    yield tile, self._logits(tile, scaled) if z is None else z

    def _rectangles(self) -> Iterator[tuple[int, Tensor, Tensor, int]]:
        """Side, features down, features across, and the global position of the first one across."""
        own = self.own
        yield IMAGE, own.image, own.text, own.start
        for block in self._others():
            yield IMAGE, own.image, block.text, block.start
            yield TEXT, own.text, block.image, block.start

    def _logits(self, tile: Tile, scaled: Float[Tensor, "h d"]) -> Float[Tensor, "h w"]:
        h, w = len(scaled), len(tile.right)
        if self._dense:
            self._kept.append(z := scaled.new_empty(h, w))
        else:
            z = self._z[: h * w].view(h, w)
        torch.mm(scaled, tile.right.T, out=z)
        if self._concepts is not None:
            true_pairs = tile.true_pairs(z).clone()
            z.masked_fill_(self._concepts[tile.down, None] == self._concepts[tile.across], -torch.inf)
            tile.true_pairs(z).copy_(true_pairs)
        if self._prepare is not None:
            self._prepare(z)
        return z


def row_dots(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """x_i . y_i, without the n x d products that torch.linalg.vecdot holds for a moment."""
    return torch.einsum("nd,nd->n", x, y)


def sum_over_ranks(values: Sequence[Float[Tensor, ""]], world: World, dtype: torch.dtype) -> list[Float[Tensor, ""]]:
    """Communicates. The sums over ranks of a few scalars, in one all-reduce in float64; `dtype` is the result's."""
    total = torch.stack([value.double() for value in values])
    if world.size > 1:
        dist.all_reduce(total, group=world.group)
    return list(total.to(dtype))


@contextmanager
def exact_arithmetic(device: torch.device) -> Iterator[None]:
    """No autograd, no autocast and no reduced-precision matrix products inside, whatever the towers run in.

    TF32 logits are 2^-11 off: at a scale of 100 that is 5% of a probability.
    """
    precision = torch.get_float32_matmul_precision()
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
