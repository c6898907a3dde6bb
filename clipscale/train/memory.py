"""How many graphs a step may keep: each saves its chunk a second forward, and costs its activations."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil
import torch
import torch.distributed as dist

from clipscale.data.loader import Batch
from clipscale.dist.engine import Tower
from clipscale.dist.world import World
from clipscale.loss.cache import Chunk, cut_images, cut_texts, graph_bytes, graphs_that_fit
from clipscale.step import StepShape
from clipscale.train.build import Parts

_SHARE = {"cuda": 0.5, "cpu": 0.25}  # of what is free; the rest is for fragmentation, and for others on this machine


def keep_graphs(shape: StepShape, parts: Parts, batch: Batch, world: World) -> StepShape:
    """Communicates. The same step with as many graphs kept as fit; measured on the chunks of a batch.

    Images come first: they take longer per chunk. Call it after a whole step, whose peak is then known.
    """
    budget = _budget(parts.config.train.keep_graph_bytes, world)
    if parts.config.train.keep_graph_bytes == 0:
        return shape
    tokens = batch.tokens
    texts = cut_texts(tokens, parts.engine.model.text_lengths(tokens), shape.text_chunk)
    images = cut_images(batch.images, shape.image_chunk)
    towers: list[tuple[Tower, tuple[Chunk, ...]]] = [("image", images), ("text", texts)]
    kept: dict[Tower, int] = {}
    for tower, chunks in towers:
        # The last text chunk is the longest. All ranks measure, since under ZeRO-3 a forward is a joint effort.
        bytes_each = graph_bytes(parts.engine, tower, chunks[-1])
        number = torch.tensor(graphs_that_fit(budget, bytes_each, len(chunks)))
        if world.size > 1:
            dist.all_reduce(number, dist.ReduceOp.MIN, group=world.control)
        kept[tower] = int(number)
        budget -= kept[tower] * bytes_each
    return replace(shape, keep_image_graphs=kept["image"], keep_text_graphs=kept["text"])


def _budget(setting: int | str, world: World) -> int:
    if isinstance(setting, int):
        return setting
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        cached = torch.cuda.memory_reserved(world.device) - torch.cuda.max_memory_allocated(world.device)
        return int(_SHARE["cuda"] * (free + cached))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return int(_SHARE["cpu"] * psutil.virtual_memory().available / local_ranks)
