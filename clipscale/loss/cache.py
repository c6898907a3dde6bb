"""The gradient cache: a tower's pass over a batch too large for its graph, in chunks, exact to the last parameter.

`embed` runs every chunk without a graph and notes the random state it started from. The loss then says what gradient
each feature has. `replay` runs every chunk again from that state, with a graph, and sends the noted gradient through
it. Peak memory is that of one chunk; the cost is one extra forward (Gao et al. 2021, arXiv:2101.06983).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from clipscale.dist.engine import Engine, Tower


@dataclass(frozen=True)
class RandomState:
    """Of the CPU and, where that is another, of the device: open_clip's patch dropout draws on the CPU."""

    cpu: Tensor
    device: Tensor | None

    @staticmethod
    def now(device: torch.device) -> RandomState:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return RandomState(torch.get_rng_state(), on_device)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Whatever the block draws, the stream goes on after it as if nothing had been drawn."""
    before = RandomState.now(device)
    try:
        yield
    finally:
        before.restore(device)


@dataclass(frozen=True)
class Embedded:
    """One tower's features of this rank's rows, and what it takes to run the same chunks again."""

    tower: Tower
    chunks: tuple[Tensor, ...]  # rows of the batch, one index tensor a chunk
    inputs: tuple[Tensor, ...]  # on the host until their chunk runs
    states: tuple[RandomState, ...]
    features: Float[Tensor, "n d"]  # in the order of the batch
    log_scale: Float[Tensor, "1"]


def chunk_rows(num_rows: int, chunk: int, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
    """Row numbers cut into chunks, the last one ragged; sorted by length where lengths [n] are given."""
    order = torch.arange(num_rows) if lengths is None else torch.argsort(lengths, stable=True)
    return order.split(chunk)


def cut_images(images: Shaped[Tensor, "n c h w"], chunk: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """-> (rows of each chunk, inputs of each chunk)"""
    rows = chunk_rows(len(images), chunk)
    return rows, images.split(chunk)


def cut_texts(
    tokens: Shaped[Tensor, "n l"], lengths: Shaped[Tensor, "n"], chunk: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Sorts by length and trims each chunk to its longest caption: the loss does not care about order in the batch."""
    rows = chunk_rows(len(tokens), chunk, lengths)
    return rows, tuple(tokens[part, : int(lengths[part].max())] for part in rows)


def embed(engine: Engine, tower: Tower, rows: Sequence[Tensor], inputs: Sequence[Tensor]) -> Embedded:
    """Every chunk through its tower, no graph."""
    states, parts = [], []
    log_scale = torch.empty(0)
    with torch.no_grad():
        for part in inputs:
            states.append(RandomState.now(engine.device))
            features, log_scale = engine.forward(tower, part.to(engine.device, non_blocking=True))
            parts.append(features)
    in_chunk_order = torch.cat(parts)  # k x [c, d] -> [n, d]
    features = torch.empty_like(in_chunk_order)
    features[torch.cat(list(rows)).to(engine.device)] = in_chunk_order
    return Embedded(tower, tuple(rows), tuple(inputs), tuple(states), features, log_scale)


def replay(
    engine: Engine,
    embedded: Embedded,
    gradient: Float[Tensor, "n d"],
    *,
    d_log_scale: Float[Tensor, ""] | None = None,
) -> None:
    """Sends `gradient` through the tower, chunk by chunk. Communicates once, and only where `d_log_scale` is given.

    That marks the step's last replay: its last chunk carries the temperature's gradient, and there the engine averages
    everything over the ranks.
    """
    with random_state_kept(engine.device):
        for index, (rows, inputs, state) in enumerate(
            zip(embedded.chunks, embedded.inputs, embedded.states, strict=True)
        ):
            state.restore(engine.device)
            features, log_scale = engine.forward(embedded.tower, inputs.to(engine.device, non_blocking=True))
            surrogate = (features * gradient[rows.to(engine.device)]).sum()
            last = d_log_scale is not None and index == len(embedded.chunks) - 1
            if last:
                surrogate = surrogate + (log_scale * d_log_scale).sum()
            engine.backward(surrogate, last=last)
