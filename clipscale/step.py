"""One optimizer step. Read this first.

embed          every chunk through its tower, no graph          -> image and text features [n, d]
differentiate  gather the features, exact loss over the batch   -> loss and the gradient of each feature
replay         every chunk again, backward from its gradient
engine.step    norm, clipping, update, clamp
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from clipscale.dist.engine import Engine
from clipscale.dist.world import World
from clipscale.loss.cache import Embedded, cut_images, cut_texts, embed, replay
from clipscale.loss.gather import Gathering, start_gather
from clipscale.loss.tiles import LossGradients


class Loss(Protocol):
    """The exact loss of the global batch. `build` makes one from `[loss]`."""

    def __call__(
        self,
        image: Float[Tensor, "n d"],
        text: Float[Tensor, "n d"] | Gathering,
        scalars: Float[Tensor, "s"],
        world: World,
        concepts: Int[Tensor, "n"] | None,
    ) -> LossGradients: ...


@dataclass(frozen=True)
class StepShape:
    """How a step is cut up. It bounds memory and sets the speed, and changes nothing else."""

    image_chunk: int
    text_chunk: int
    keep_image_graphs: int = 0  # chunks whose graph stays from the embedding on
    keep_text_graphs: int = 0
    always_graph: bool = False  # see `embed`
    gather_early: bool = True  # not for the ring, which never gathers
    gather_dtype: torch.dtype | None = None
    check_replay: bool = False


@dataclass(frozen=True)
class StepResult:
    loss: float
    grad_norm: float  # of the whole gradient, before clipping; NaN where the loss was not finite
    logit_scale: float

    @property
    def applied(self) -> bool:
        """Whether the weights were updated: a step whose loss or gradient is not finite is left out on all ranks."""
        return math.isfinite(self.grad_norm)


def train_step(
    engine: Engine,
    images: Shaped[Tensor, "n c h w"],
    tokens: Shaped[Tensor, "n l"],
    world: World,
    *,
    shape: StepShape,
    loss: Loss,
    lr_factor: float,
    concepts: Int[Tensor, "n"] | None = None,
) -> StepResult:
    """Communicates. One step on this rank's uint8 images and token ids of the global batch; ranks hold equally many.

    Where the loss or the gradient is not finite, the weights and the optimizer stay as they were.
    """
    rows = [len(tokens)] * world.size
    texts = cut_texts(tokens, engine.model.text_lengths(tokens), shape.text_chunk)
    text = embed(engine, "text", texts, keep=shape.keep_text_graphs, always_graph=shape.always_graph)
    # Text first: its features travel while the images, which take longer, are still in their tower.
    travelling = text.features
    if shape.gather_early:
        travelling = start_gather(text.features, world, rows=rows, dtype=shape.gather_dtype)
    pictures = cut_images(images, shape.image_chunk)
    image = embed(engine, "image", pictures, keep=shape.keep_image_graphs, always_graph=shape.always_graph)

    result = loss(image.features, travelling, image.scalars, world, concepts)
    value, logit_scale = result.loss.item(), image.scalars[0].exp().item()
    if not math.isfinite(value):  # the global batch's, so on all ranks
        return StepResult(value, math.nan, logit_scale)

    # A rank's backward carries W times its share of the gradient, so that the engine's mean over ranks is the whole.
    # The gradient of temperature and bias is the whole already, on every rank: the mean leaves it as it is.
    gradients = [(text, result.d_text * world.size), (image, result.d_image * world.size)]
    _replay_trained(engine, gradients, _d_scalars(result), check=shape.check_replay)
    grad_norm = engine.step(lr_factor)
    return StepResult(value, grad_norm, logit_scale)


def _replay_trained(
    engine: Engine, gradients: list[tuple[Embedded, Tensor]], d_scalars: Float[Tensor, "s"], *, check: bool
) -> None:
    """Communicates. A locked tower has nothing to learn: it is not run again."""
    trained = [pair for pair in gradients if engine.model.is_trained(pair[0].tower)]
    for embedded, gradient in trained[:-1]:
        replay(engine, embedded, gradient, check=check)
    embedded, gradient = trained[-1]
    replay(engine, embedded, gradient, d_scalars=d_scalars, check=check)


def _d_scalars(result: LossGradients) -> Float[Tensor, "s"]:
    both = [result.d_log_scale, result.d_bias]
    return torch.stack([gradient for gradient in both if gradient is not None])
