"""One optimizer step. Read this first.

embed          every chunk through its tower, no graph          -> image and text features [n, d]
differentiate  gather the features, exact loss over the batch   -> loss and the gradient of each feature
replay         every chunk again, backward from its gradient
engine.step    norm, clipping, update, clamp
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from clipscale.dist.engine import Engine
from clipscale.dist.world import World
from clipscale.errors import DivergedError
from clipscale.loss.cache import cut_images, cut_texts, embed, replay
from clipscale.loss.contrastive import contrastive_loss


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float  # of the whole gradient, before clipping
    logit_scale: float


def train_step(
    engine: Engine,
    images: Tensor,
    tokens: Tensor,
    world: World,
    *,
    image_chunk: int,
    text_chunk: int,
    lr_factor: float,
) -> StepResult:
    """Communicates. One step on this rank's images [n, 3, H, W] and token ids [n, L] of the global batch.

    Raises `DivergedError` on all ranks when the loss is not finite; the weights are then still the last good ones.
    """
    # Text first: its features can travel while the images, which take longer, are still on their way.
    text = embed(engine, "text", *cut_texts(tokens, engine.model.text_lengths(tokens), text_chunk))
    image = embed(engine, "image", *cut_images(images, image_chunk))
    result = contrastive_loss(image.features, text.features, image.log_scale.squeeze(0), world)
    loss = result.loss.item()
    if not math.isfinite(loss):
        error = DivergedError(f"the loss is {loss}. Lower optim.lr, lengthen optim.warmup, or set train.clip_norm")
        error.on_all_ranks = True  # the loss is the global batch's
        raise error
    # A rank's backward carries W times its share of the gradient, so that the engine's mean over ranks is the whole.
    # The temperature's gradient is the whole already, on every rank: the mean leaves it as it is.
    replay(engine, text, result.d_text * world.size)
    replay(engine, image, result.d_image * world.size, d_log_scale=result.d_log_scale)
    grad_norm = engine.step(lr_factor)
    return StepResult(loss, grad_norm, image.log_scale.exp().item())
