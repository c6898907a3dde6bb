"""The softmax contrastive loss (InfoNCE) of the whole global batch, exact, in tiles, with gradients in closed form.

    z_ij = s * image_i . text_j,  s = exp(log_scale)
    loss = 1/(2N) sum_i [(lse_j z_ij - z_ii) + (lse_j z_ji - z_ii)]

(Radford et al. 2021, "Learning Transferable Visual Models From Natural Language Supervision", figure 3.) With
row_i = lse_j z_ij and col_j = lse_i z_ij its derivative is

    dloss/dz_ij = 1/(2N) (exp(z_ij - row_i) + exp(z_ij - col_j) - 2 [i = j])

so 2N scalars are all that ranks must tell each other beside their features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from clipscale.dist.world import World
from clipscale.loss.gather import Batch, Gathering, gather_rows, share_features
from clipscale.loss.tiles import (
    DEFAULT_BUDGET_BYTES,
    LogitTiles,
    LossGradients,
    exact_arithmetic,
    row_dots,
    sum_over_ranks,
)


def contrastive_loss(
    image: Float[Tensor, "n d"] | Gathering,
    text: Float[Tensor, "n d"] | Gathering,
    log_scale: Float[Tensor, ""],
    world: World,
    *,
    rows: Sequence[int] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    gather_dtype: torch.dtype | None = None,
    ring: bool = False,
    concepts: Int[Tensor, " n"] | None = None,
) -> LossGradients:
    """Communicates. The exact loss over all ranks' pairs, and its gradients by this rank's features and the log scale.

    Features of any length are right, those of unit length are fast. float64 stays float64; all else is computed and
    returned in float32. Non-finite features give non-finite results. Nothing is recorded for autograd.

    `rows` are the row counts of all ranks, at least one each. Without them they are exchanged: one small collective.
    `budget_bytes` bounds the memory for logits; everything held beside it is O(Nd).
    `gather_dtype=torch.bfloat16` halves the traffic: the loss is then that of rounded features, each coordinate up to
    2^-9 off, and its gradient is passed on to the unrounded ones. The result is the same for every number of ranks.
    `ring` never holds all features, and receives them twice.
    `concepts` say what a sample shows: different samples of equal concept are not each other's negatives. Their pairs
    are left out of the log-sums of both sides; the only positive of a sample stays its own partner.
    """
    with exact_arithmetic(log_scale.device):
        # 1. Everybody's features.
        batch = share_features(image, text, world, rows=rows, gather_dtype=gather_dtype, ring=ring)
        own = batch.own
        scale = log_scale.to(own.image.dtype).exp()
        positives = scale * row_dots(own.image, own.text)
        shift = _common_shift(batch, scale, positives, world)
        tiles = LogitTiles(
            batch,
            scale,
            budget_bytes=budget_bytes,
            keep=True,
            prepare=None if shift is None else lambda z: z.sub_(shift).exp_(),
            concepts=None if concepts is None else gather_rows(concepts, world, batch.rows),
        )
        # 2. The log-sums of this rank's own rows, of both sides.
        own_lse = _log_sums(tiles, shift)
        # 3. Everybody's log-sums.
        lse = gather_rows(own_lse, world, batch.rows)
        # 4. The tiles once more, now as weights for the features across.
        d_image, d_text = _gradients(tiles, lse, shift)

        num_pairs = len(lse)
        d_image.mul_(scale / (2 * num_pairs))
        d_text.mul_(scale / (2 * num_pairs))
        rank_loss = (own_lse.sum(1) - 2 * positives).sum() / (2 * num_pairs)
        # sum_ij z_ij dloss/dz_ij over the rows of images alone: they hold every logit once.
        rank_d_log_scale = row_dots(own.image, d_image).sum()
        loss, d_log_scale = sum_over_ranks([rank_loss, rank_d_log_scale], world, scale.dtype)
        return LossGradients(loss, d_image, d_text, d_log_scale)


def _common_shift(batch: Batch, scale: Float[Tensor, ""], positives: Float[Tensor, " n"], world: World) -> float | None:
    """Communicates (four numbers). A shift with which exp(z - shift) serves rows and columns alike; None if none does.

    Then a logit costs one exponential, and no running maximum is needed. float32 holds exp(-87) to exp(88). Upwards, a
    logit is at most s |image| |text|, and 2^24 of them are summed. Downwards, exponentials may vanish where they are
    small beside the sum of their row and of their column, which is at least exp(z_ii). Up to s = 53 that is always so;
    at s = 100 no true pair may have a cosine below -0.17.
    """
    lengths = [torch.linalg.vector_norm(x, dim=1).amax() for x in (batch.own.image, batch.own.text)]
    extremes = torch.stack([scale, *lengths, -positives.amin()])
    if world.size > 1:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=world.group)  # all ranks take the same path
    s, image_length, text_length, negated_lowest = extremes.tolist()  # waits for the device
    shift = max(0.0, s * image_length * text_length - 64)
    return shift if negated_lowest <= 53 - shift else None  # None for NaN, too


def _log_sums(tiles: LogitTiles, shift: float | None) -> Float[Tensor, "n 2"]:
    """For this rank's own samples i: log sum_j exp(z_ij) over all texts, and the same over all images."""
    image = tiles.own.image
    sums = image.new_full((2, len(image)), 0.0 if shift is not None else -torch.inf)
    for tile, z in tiles:
        for side, rows, seen, _ in tile.views(z):
            if shift is not None:
                sums[side, rows] += seen.sum(1)
            else:
                sums[side, rows] = torch.logaddexp(sums[side, rows], seen.logsumexp(1))
    return (sums.log_().add_(shift) if shift is not None else sums).T


def _gradients(
    tiles: LogitTiles, lse: Float[Tensor, "total 2"], shift: float | None
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n d"]]:
    """2N/s times the gradients by this rank's own features: sum_j 2N dloss/dz_ij text_j, and the other way round."""
    d_image, d_text = d = [torch.zeros_like(x) for x in (tiles.own.image, tiles.own.text)]
    for tile, z in tiles:
        down, across = lse[tile.down, tile.side, None], lse[tile.across, 1 - tile.side]
        weights = tiles.scratch(z)
        if shift is not None:  # exp(z - down) + exp(z - across) from the exponential that z already is
            torch.add((shift - down).exp_(), (shift - across).exp_(), out=weights).mul_(z)
        else:
            torch.sub(z, down, out=weights).exp_().add_(z.sub_(across).exp_())
        tile.true_pairs(weights).sub_(2)
        for side, rows, seen, features in tile.views(weights):
            d[side][rows].addmm_(seen, features)
    return d_image, d_text
