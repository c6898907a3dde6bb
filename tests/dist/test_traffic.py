"""Bytes between ranks, counted by hand, and what the hierarchy of hsdp saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from clipscale.dist.traffic import Flow, TrafficMeter
from clipscale.dist.world import World
from clipscale.train.loop import train
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import Toy


def talk(world: World) -> list[Flow]:
    pair = dist.new_group([0, 1]) if world.size > 1 else None
    with TrafficMeter() as meter:
        dist.all_reduce(torch.zeros(10), group=world.group)
        dist.all_reduce(torch.zeros(20, dtype=torch.float64), group=world.group)
        dist.all_gather_into_tensor(torch.zeros(3 * 8), torch.zeros(8), group=world.group)
        dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(12), group=world.group)
        if world.rank < 2:
            dist.broadcast(torch.zeros(6), src=0, group=pair)
        torch.zeros(100) + 1
    dist.all_reduce(torch.zeros(10), group=world.group)
    return meter.flows()


def test_by_hand() -> None:
    everybody = (0, 1, 2)
    common = [
        Flow("allgather", everybody, 1, 2 * 8 * 4),
        Flow("allreduce", everybody, 2, round(4 * 10 * 4 / 3) + round(4 * 20 * 8 / 3)),
    ]
    scattered = Flow("reduce_scatter", everybody, 1, 2 * 4 * 4)
    pair = Flow("broadcast", (0, 1), 1, 12)
    assert run_ranks(3, talk) == [
        [*common, pair, scattered],
        [*common, pair, scattered],
        [*common, scattered],
    ]


def traffic_of_a_run(world: World, toy: Toy, out: Path, *settings: str) -> list[dict[str, Any]]:
    train(toy.config("train.duration.steps=2", *settings), out, world, Console(quiet=True))
    world.barrier("the end")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (found,) = [line["traffic"] for line in lines if "traffic" in line]
    return found


def among(flows: list[dict[str, Any]], ranks: list[int], *collectives: str) -> int:
    return sum(flow["received_bytes"] for flow in flows if flow["ranks"] == ranks and flow["collective"] in collectives)


def test_groups_of_hsdp_talk_once_a_step_about_their_shard(toy: Toy, tmp_path: Path) -> None:
    """On two groups of two, beside one group of four."""
    hsdp = ("engine.kind=hsdp", "train.image_chunk=4", "train.text_chunk=4", "train.keep_graph_bytes=0")
    two = run_ranks(4, traffic_of_a_run, toy, tmp_path / "two", *hsdp, "engine.shard_group=2")[0]
    one = run_ranks(4, traffic_of_a_run, toy, tmp_path / "one", *hsdp, "engine.shard_group=4")[0]
    weights = ("allgather", "reduce_scatter")
    (across,) = [flow for flow in two if flow["ranks"] == [0, 2]]
    assert (across["collective"], across["calls"]) == ("allreduce", 1)
    inside = [flow for flow in two if flow["ranks"] == [0, 1] and flow["collective"] == "reduce_scatter"]
    shard_bytes = across["received_bytes"]  # a ring of two receives the buffer once
    # Every chunk of both towers scatters its tower's gradients: eight chunks, so four times the model.
    assert inside[0]["received_bytes"] > 3 * shard_bytes
    # Between the groups, only the shard of gradients; with one group of four, weights and gradients of every chunk.
    assert among(two, [0, 2], *weights) == 0
    assert among(one, [0, 1, 2, 3], *weights) > 10 * shard_bytes
