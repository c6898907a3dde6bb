"""The gradient cache: a tower's pass over a batch too large for its graph, in chunks, exact to the last parameter.

`embed` runs every chunk without a graph and notes the random state it started from. The loss then says what gradient
each feature has. `replay` runs every chunk again from that state, with a graph, and sends the noted gradient through
it. Peak memory is that of one chunk; the cost is one extra forward (Gao et al. 2021, arXiv:2101.06983). Where memory is
left, the graphs of the last chunks are kept instead of built twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from clipscale.dist.engine import Engine, Tower, local
from clipscale.errors import DivergedError

_REPLAY_TOLERANCE = 1e-2  # between coordinates of unit features; other random numbers move them by ten times as much


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
class Chunk:
    """Some rows of one tower's batch: which ones, and what the tower is given, on the host until its turn comes."""

    rows: Int[Tensor, "c"]
    inputs: Shaped[Tensor, "c ..."]

    def to(self, device: torch.device) -> Tensor:
        return self.inputs.to(device, non_blocking=True)


def cut_images(images: Shaped[Tensor, "n c h w"], chunk: int) -> tuple[Chunk, ...]:
    """Chunks in the order of the batch, the last one ragged."""
    return tuple(map(Chunk, torch.arange(len(images)).split(chunk), images.split(chunk)))


def cut_texts(tokens: Shaped[Tensor, "n l"], lengths: Shaped[Tensor, "n"], chunk: int) -> tuple[Chunk, ...]:
    """Sorts by length and trims each chunk to its longest caption: the loss does not care about order in the batch."""
    order = torch.argsort(lengths, stable=True)
    return tuple(Chunk(rows, tokens[rows, : int(lengths[rows].max())]) for rows in order.split(chunk))


@dataclass(frozen=True)
class Graph:
    """One chunk's outputs, still attached to what made them."""

    features: Float[Tensor, "c d"]
    scalars: Float[Tensor, "s"]


@dataclass(frozen=True)
class Embedded:
    """One tower's features of this rank's rows, and what it takes to run the same chunks again."""

    tower: Tower
    chunks: tuple[Chunk, ...]
    states: tuple[RandomState, ...]
    graphs: tuple[Graph | None, ...]
    features: Float[Tensor, "n d"]  # in the order of the batch
    scalars: Float[Tensor, "s"]  # log scale, and for the sigmoid loss the bias


def embed(
    engine: Engine, tower: Tower, chunks: Sequence[Chunk], *, keep: int = 0, always_graph: bool = False
) -> Embedded:
    """Every chunk through its tower, without a graph but for the last `keep` chunks.

    `always_graph` builds every graph and drops it at once: for compiled towers, whose program without gradients is
    another one and may draw its random numbers in another order.
    """
    states, graphs, parts, scalars = [], [], [], []
    for index, chunk in enumerate(chunks):
        kept = index >= len(chunks) - keep
        states.append(RandomState.now(engine.device))
        with torch.set_grad_enabled(kept or always_graph):
            graph = Graph(*engine.forward(tower, chunk.to(engine.device)))
        graphs.append(graph if kept else None)
        parts.append(graph.features.detach())
        scalars.append(graph.scalars.detach())
    in_chunk_order = torch.cat(parts)  # k x [c, d] -> [n, d]
    features = torch.empty_like(in_chunk_order)
    features[torch.cat([chunk.rows for chunk in chunks]).to(engine.device)] = in_chunk_order
    return Embedded(tower, tuple(chunks), tuple(states), tuple(graphs), features, scalars[-1])


def replay(
    engine: Engine,
    embedded: Embedded,
    gradient: Float[Tensor, "n d"],
    *,
    d_scalars: Float[Tensor, "s"] | None = None,
    check: bool = False,
) -> None:
    """Sends `gradient` through the tower, chunk by chunk. Communicates once, and only where `d_scalars` is given.

    That marks the step's last replay: its last chunk carries the gradient of temperature and bias, and there the engine
    averages everything over the ranks. The chunks come in reverse, so that kept graphs go first and free their memory.
    With `check`, raises `DivergedError` where a chunk's features are not those that were embedded.
    """
    with random_state_kept(engine.device):
        for index in reversed(range(len(embedded.chunks))):
            chunk, graph = embedded.chunks[index], embedded.graphs[index]
            rows = chunk.rows.to(engine.device)
            if graph is None:
                embedded.states[index].restore(engine.device)
                graph = Graph(*engine.forward(embedded.tower, chunk.to(engine.device)))
                if check:
                    _check_replayed(graph.features, embedded.features[rows], embedded.tower)
            surrogate = (graph.features * gradient[rows]).sum()
            last = index == 0 and d_scalars is not None
            if index == 0 and d_scalars is not None:
                surrogate = surrogate + (graph.scalars * d_scalars).sum()
            engine.backward(surrogate, last=last)


def _check_replayed(replayed: Float[Tensor, "c d"], embedded: Float[Tensor, "c d"], tower: Tower) -> None:
    apart = (replayed.detach() - embedded).abs().max().item()
    if not apart <= _REPLAY_TOLERANCE:
        raise DivergedError(
            f"the {tower} tower gave other features in its replay, up to {apart:.3g} apart. Does it draw random "
            "numbers from a generator of its own, or keep state between its forwards?"
        )


def graph_bytes(engine: Engine, tower: Tower, chunk: Chunk) -> int:
    """What autograd holds between forward and backward of this chunk, beside the weights. Runs the forward once."""
    weights = {local(parameter).untyped_storage().data_ptr() for parameter in engine.model.parameters()}
    held: dict[int, torch.UntypedStorage] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        held[storage.data_ptr()] = storage
        return saved

    with random_state_kept(engine.device), torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        # The graph must live while it is measured: a freed storage's address would serve the next one.
        graph = engine.forward(tower, chunk.to(engine.device))
        # Sized only now: under hsdp the graph refers to gathered weights, which are freed after the forward.
        size = sum(storage.nbytes() for address, storage in held.items() if address not in weights)
    del graph
    return size


def graphs_that_fit(budget_bytes: int, bytes_each: int, num_chunks: int) -> int:
    """How many of a tower's chunks can keep their graph."""
    return min(num_chunks, budget_bytes // max(1, bytes_each))
