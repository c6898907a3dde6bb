"""What travels between ranks: measured, by collective and by the ranks that take part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Flow:
    """One kind of collective among one set of ranks."""

    collective: str
    ranks: tuple[int, ...]
    calls: int
    received_bytes: int  # by this rank, where the collective runs as a ring


# Bytes received per rank among n, from the bytes of the larger side: what is gathered, scattered or reduced.
_RECEIVED: dict[str, Callable[[int, int], float]] = {
    "allreduce": lambda size, n: 2 * size * (n - 1) / n,
    "allgather": lambda size, n: size * (n - 1) / n,
    "reduce_scatter": lambda size, n: size * (n - 1) / n,
    "broadcast": lambda size, n: size * (n - 1) / n,
    "alltoall": lambda size, n: size * (n - 1) / n,
    "recv": lambda size, n: size,  # noqa: ARG005
}


class TrafficMeter(TorchDispatchMode):
    """Counts the collectives that this rank takes part in while the block runs; costs a little per operation."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace == "c10d":
            self._note(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any) -> None:
        collective = next((known for known in _RECEIVED if known in name), None)
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if collective is None or group is None:
            return
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
        sides = [sum(tensor.nbytes for tensor in _tensors(arg)) for arg in args[:2]]
        self._calls[collective, ranks] += 1
        self._bytes[collective, ranks] += round(_RECEIVED[collective](max(sides), len(ranks)))

    def flows(self) -> list[Flow]:
        return [
            Flow(name, ranks, calls, self._bytes[name, ranks]) for (name, ranks), calls in sorted(self._calls.items())
        ]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
