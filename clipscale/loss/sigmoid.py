"""The sigmoid loss (SigLIP) of the whole global batch, exact, in tiles, with gradients in closed form.

    z_ij = s * image_i . text_j + b,  s = exp(log_scale),  y_ij = 1 for true pairs, else -1
    loss = -1/N sum_ij log sigmoid(y_ij z_ij)

(Zhai et al. 2023, "Sigmoid Loss for Language Image Pre-Training", section 3.2 and algorithm 1: divided by N samples,
not by N^2 pairs.) Every pair stands alone,

    dloss/dz_ij = 1/N (sigmoid(z_ij) - [i = j])

so one pass over the tiles is enough and ranks exchange features only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from clipscale.dist.world import World
from clipscale.loss.gather import Gathering, gather_rows, share_features
from clipscale.loss.tiles import (
    DEFAULT_BUDGET_BYTES,
    IMAGE,
    LogitTiles,
    LossGradients,
    exact_arithmetic,
    row_dots,
    sum_over_ranks,
)


def sigmoid_loss(
    image: Float[Tensor, "n d"] | Gathering,
    text: Float[Tensor, "n d"] | Gathering,
    log_scale: Float[Tensor, ""],
    bias: Float[Tensor, ""],
    world: World,
    *,
    rows: Sequence[int] | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    gather_dtype: torch.dtype | None = None,
    ring: bool = False,
    concepts: Int[Tensor, " n"] | None = None,
) -> LossGradients:
    """Communicates. The exact loss over all ranks' pairs, and its gradients by own features, log scale and bias.

    Arguments and number formats are those of `contrastive_loss`. `concepts` leave out the pairs of different samples of
    equal concept; a ring receives the features once.
    """
    with exact_arithmetic(log_scale.device):
        batch = share_features(image, text, world, rows=rows, gather_dtype=gather_dtype, ring=ring)
        own, num_pairs = batch.own, sum(batch.rows)
        scale, bias = log_scale.to(own.image.dtype).exp(), bias.to(own.image.dtype)
        tiles = LogitTiles(
            batch,
            scale,
            budget_bytes=budget_bytes,
            keep=False,
            prepare=lambda z: z.add_(bias),
            concepts=None if concepts is None else gather_rows(concepts, world, batch.rows),
        )
        rank_loss, d_image, d_text, rank_d_bias = _accumulate(tiles)
        d_image.mul_(scale / num_pairs)
        d_text.mul_(scale / num_pairs)
        # sum_ij (z_ij - b) dloss/dz_ij over the rows of images alone: they hold every logit once.
        rank_d_log_scale = row_dots(own.image, d_image).sum()
        totals = [rank_loss / num_pairs, rank_d_log_scale, rank_d_bias / num_pairs]
        loss, d_log_scale, d_bias = sum_over_ranks(totals, world, scale.dtype)
        return LossGradients(loss, d_image, d_text, d_log_scale, d_bias)


def _accumulate(tiles: LogitTiles) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's part of the loss, gradients by its features, part of that by bias: times N, N/s, N/s and N."""
    d_image, d_text = d = [torch.zeros_like(x) for x in (tiles.own.image, tiles.own.text)]
    loss, d_bias = d_image.new_zeros(2, dtype=torch.float64).unbind()
    for tile, z in tiles:
        # Negated logits of true pairs make every term softplus(z). sigmoid(z) - 1 = -sigmoid(-z) keeps all its digits.
        tile.true_pairs(z).neg_()
        if tile.side == IMAGE:
            # threshold: above 40, softplus(z) = z also in float64
            loss += torch.ops.aten.softplus.out(z, 1, 40, out=tiles.scratch(z)).sum()
        tile.true_pairs(z.sigmoid_()).neg_()
        if tile.side == IMAGE:
            d_bias += z.sum()
        for side, rows, seen, features in tile.views(z):
            d[side][rows].addmm_(seen, features)
    return loss, d_image, d_text, d_bias
