"""Where each layer lies in what the optimizer is given.

An engine may hand the optimizer each layer whole, a slice of all layers end to end (ZeRO), or a slice of each layer
(FSDP). A `Layout` says which elements of which tensor belong to which layer, and adds up over the ranks that share a
layer. Layers are numbered as the model names its trained parameters, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from clipscale.dist.engine import local


@dataclass(frozen=True)
class Segment:
    """`length` elements of layer `layer`, from its element `offset` on, lie at `start` of the flattened `holder`."""

    layer: int
    offset: int
    holder: Tensor
    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """The segment's elements of a tensor laid out as the holder is: itself, its gradient, a moment. A view."""
        return local(tensor).view(-1)[self.start : self.start + self.length]


@dataclass(frozen=True)
class Layout:
    """All segments on this rank, and the ranks over which layers are cut."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    segments: tuple[Segment, ...]
    group: dist.ProcessGroup | None = None  # None: every layer is whole

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Communicates once, in place, where layers are cut. -> `values`"""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def whole(self, part_of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Communicates, a layer at a time. Layers on the CPU, put together from `part_of(holder)`, on every rank."""
        found: dict[str, Tensor] = {}
        mine: dict[int, list[Segment]] = {}
        for segment in self.segments:
            mine.setdefault(segment.layer, []).append(segment)
        device = self.segments[0].holder.device if self.segments else torch.device("cpu")
        for layer, (name, shape) in enumerate(zip(self.names, self.shapes, strict=True)):
            flat = torch.zeros(shape.numel(), device=device)
            for segment in mine.get(layer, []):
                flat[segment.offset : segment.offset + segment.length] = segment.of(part_of(segment.holder))
            found[name] = self.sum_over_ranks(flat).view(shape).cpu()
        return found


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def whole_layers(model: nn.Module) -> Layout:
    """Every rank updates every layer: the plain engine, ZeRO-0."""
    return _layout(
        model, [Segment(i, 0, layer, 0, layer.numel()) for i, (_, layer) in enumerate(trained_parameters(model))]
    )


def sharded_layers(model: nn.Module, group: dist.ProcessGroup) -> Layout:
    """FSDP2: each layer is a DTensor cut along its first dimension, of which this rank holds some rows, or none."""
    segments = []
    for index, (_, layer) in enumerate(trained_parameters(model)):
        assert isinstance(layer, DTensor)
        rows = -(-layer.shape[0] // layer.device_mesh.size())
        offset = rows * layer.device_mesh.get_local_rank() * (layer.numel() // layer.shape[0])
        segments.append(Segment(index, offset, layer, 0, layer.to_local().numel()))
    return _layout(model, segments, group)


def of_zero(model: nn.Module, zero: Any, stage: int) -> Layout:
    """ZeRO of any stage; `zero` is DeepSpeed's optimizer, or under stage 0 whatever."""
    if stage == 0:
        return whole_layers(model)
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    return (zero_3 if stage == 3 else zero_1_2)(model, zero, group)


def zero_1_2(model: nn.Module, zero: Any, group: dist.ProcessGroup) -> Layout:
    """ZeRO-1 and 2: all layers of a group end to end, cut into as many equal partitions as there are ranks.

    DeepSpeed notes on each parameter which part of it this rank's fp32 partition holds, and where; none: no note.
    """
    segments = []
    for index, (_, layer) in enumerate(trained_parameters(model)):
        note = layer._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
        if note is not None:
            holder = zero.single_partition_of_fp32_groups[note.param_group_index]
            in_holder, in_layer = note.hp_fragment_address, note.lp_fragment_address
            segments.append(Segment(index, in_layer.start, holder, in_holder.start, in_holder.numel))
    return _layout(model, segments, group)


def zero_3(model: nn.Module, zero: Any, group: dist.ProcessGroup) -> Layout:
    """ZeRO-3: each layer is cut into as many equal parts as there are ranks, the last ones padded or empty.

    A rank's parts of all layers of a group lie end to end in its fp32 partition.
    """
    number = {id(layer): index for index, (_, layer) in enumerate(trained_parameters(model))}
    segments = []
    for layers, holder in zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True):
        start = 0
        for layer in layers:
            part = layer.ds_tensor.ds_numel
            offset = part * dist.get_rank(group)
            length = max(0, min(part, layer.ds_numel - offset))
            segments.append(Segment(number[id(layer)], offset, holder, start, length))
            start += part
    return _layout(model, segments, group)


def _layout(model: nn.Module, segments: Sequence[Segment], group: dist.ProcessGroup | None = None) -> Layout:
    named = trained_parameters(model)
    # Under ZeRO-3 a parameter's own shape is [0]; DeepSpeed keeps the true one beside it.
    shapes = tuple(torch.Size(getattr(layer, "ds_shape", layer.shape)) for _, layer in named)
    filled = tuple(segment for segment in segments if segment.length)
    alone = group is None or dist.get_world_size(group) == 1
    return Layout(tuple(name for name, _ in named), shapes, filled, None if alone else group)
