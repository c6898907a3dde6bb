"""One optimizer step of a large batch: clipscale's cached step beside open_clip's gradient accumulation.

The same towers with the same first weights, the same data and global batch, AdamW, one process. open_clip's side is
`open_clip_train.train.train_one_epoch` of the installed package with `accum_freq` = chunks and a stub loader. Both
sides take turns within one run; samples/s come from the median step. A third side, `uncached`, is plain autograd on the
undivided batch.

`chunks` are chunks of images; clipscale's chunks of captions hold four times as many rows, whose activations take about
the same memory. `ratio` = clipscale / open_clip, clipscale with no graph kept (train.keep_graph_bytes = 0), so with the
least memory. `uncached_ratio` = seconds of clipscale's step with all graphs kept, as "auto" does where memory allows,
over seconds of the uncached step; null where that was not measured. Peak memory is what a step needs at its worst
beyond weights, inputs and optimizer state, in a process of its own (see bench_loss.py).

    python scripts/bench_step.py --quick --json
    python scripts/bench_step.py --plot step.png
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import multiprocessing
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from bench_loss import peak_of, seconds_of
from torch import Tensor

from clipscale.config.optim import AdamW
from clipscale.config.schema import Model, SoftmaxLoss
from clipscale.dist.engine import PlainEngine
from clipscale.dist.world import World
from clipscale.loss.contrastive import contrastive_loss
from clipscale.model.towers import Towers, build_towers
from clipscale.optim.groups import clamp_after_step, parameter_groups, treatments
from clipscale.step import StepShape, train_step

ARCHITECTURE: dict[str, Any] = {
    "embed_dim": 512,
    "vision_cfg": {"image_size": 64, "patch_size": 8, "width": 192, "layers": 6, "head_width": 64},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 192, "heads": 3, "layers": 6},
}
CAPTION_TOKENS = (5, 25)
LR = 1e-4


@dataclass(frozen=True)
class Result:
    chunks: int
    global_batch: int
    clipscale_samples_per_s: float
    open_clip_samples_per_s: float
    ratio: float
    clipscale_peak_mb: float
    open_clip_peak_mb: float
    uncached_ratio: float | None


@dataclass(frozen=True)
class Pairs:
    images: Tensor  # uint8
    tokens: Tensor


def make_pairs(number: int, device: str) -> Pairs:
    generator = torch.Generator().manual_seed(1)
    side, length = ARCHITECTURE["vision_cfg"]["image_size"], ARCHITECTURE["text_cfg"]["context_length"]
    images = torch.randint(0, 256, (number, 3, side, side), dtype=torch.uint8, generator=generator)
    tokens = torch.zeros(number, length, dtype=torch.long)
    low, high = CAPTION_TOKENS
    for row, used in zip(tokens, torch.randint(low, high + 1, (number,), generator=generator).tolist(), strict=True):
        row[0], row[used - 1] = 49406, 49407
        row[1 : used - 1] = torch.randint(1, 49406, (used - 2,), generator=generator)
    return Pairs(images.to(device), tokens.to(device))


def make_towers() -> Towers:
    torch.manual_seed(0)
    model = Model(
        embed_dim=ARCHITECTURE["embed_dim"],
        vision_cfg=ARCHITECTURE["vision_cfg"],
        text_cfg=ARCHITECTURE["text_cfg"],
    )
    return build_towers(model, SoftmaxLoss("softmax"))[0]


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    treated = treatments(model, AdamW(kind="adamw", lr=LR, weight_decay=0.2), {})
    return torch.optim.AdamW(parameter_groups(model, treated, LR), betas=(0.9, 0.98), eps=1e-6)


def clipscale_step(pairs: Pairs, chunks: int, device: str, *, keep: bool = False) -> Callable[[], float]:
    towers = make_towers().to(device)
    optimizer = make_optimizer(towers)
    optimizer.register_step_post_hook(clamp_after_step)
    world = World(0, 1, torch.device(device))
    engine = PlainEngine(towers, optimizer, world, clip_norm=1.0)
    chunk = -(-len(pairs.images) // chunks)
    # The towers are chunked apart: captions hold about a quarter of an image's tokens, so four times as many fit.
    shape = StepShape(chunk, min(len(pairs.images), 4 * chunk))
    if keep:
        shape = replace(shape, keep_image_graphs=chunks, keep_text_graphs=chunks)

    def loss(image: Any, text: Any, scalars: Tensor, world: World, concepts: Tensor | None) -> Any:
        return contrastive_loss(image, text, scalars[0], world, concepts=concepts)

    return lambda: train_step(engine, pairs.images, pairs.tokens, world, shape=shape, loss=loss, lr_factor=1.0).loss


def uncached_step(pairs: Pairs, device: str) -> Callable[[], float]:
    """Plain autograd on the undivided batch; captions trimmed to the batch's longest."""
    towers = make_towers().to(device)
    optimizer = make_optimizer(towers)
    tokens = pairs.tokens[:, : int(towers.text_lengths(pairs.tokens).max())]
    labels = torch.arange(len(tokens), device=device)

    def step() -> float:
        optimizer.zero_grad()
        image, scalars = towers("image", pairs.images)
        text, _ = towers("text", tokens)
        logits = scalars[0].exp() * image @ text.T
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(towers.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def open_clip_step(pairs: Pairs, chunks: int, device: str) -> Callable[[], float]:
    import open_clip
    from open_clip.loss import ClipLoss
    from open_clip_train.train import train_one_epoch

    logging.getLogger().setLevel(logging.WARNING)
    ours = make_towers()
    theirs = open_clip.model.CustomTextCLIP(**copy.deepcopy(ARCHITECTURE), output_dict=True)
    weights = {name: value for name, value in ours.state_dict().items() if not name.startswith("logits")}
    theirs.load_state_dict({**weights, "logit_scale": ours.logits.log_scale.detach()[0]})
    theirs.to(device)
    decayed = [p for p in theirs.parameters() if p.ndim >= 2]
    others = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98), eps=1e-6)
    losses: list[float] = []
    clip_loss = ClipLoss()

    def loss(**inputs: Any) -> Any:
        found = clip_loss(**inputs)
        losses.append(found["contrastive_loss"].item())
        return found

    # Its loader delivers normalised floats, so the conversion is not on its clock.
    pixels = (pairs.images.float() / 255 - ours.mean.to(device)) / ours.std.to(device)
    batches = list(zip(pixels.chunk(chunks), pairs.tokens.chunk(chunks), strict=True))
    loader = StubLoader(batches, num_batches=chunks, num_samples=len(pixels))
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda _epoch: None)}
    args = Namespace(
        device=device, precision="fp32", distill=False, accum_freq=chunks, skip_scheduler=True, horovod=False,
        grad_clip_norm=1.0, rank=0, local_rank=0, log_local=False, log_every_n_steps=10**9, world_size=1,
        batch_size=len(batches[0][0]), wandb=False, save_logs=False,
    )  # fmt: skip

    def step() -> float:
        losses.clear()
        train_one_epoch(theirs, data, loss, 0, optimizer, None, None, None, args)
        return losses[0]

    return step


class StubLoader(list[Any]):
    """Batches from memory, with the two counts that the loop asks for."""

    def __init__(self, batches: list[Any], *, num_batches: int, num_samples: int) -> None:
        super().__init__(batches)
        self.num_batches, self.num_samples = num_batches, num_samples


def peak_mb(side: str, chunks: int, batch: int, device: str) -> float:
    """Runs in a fresh process. The second step is measured: the first makes the optimizer state."""
    pairs = make_pairs(batch, device)
    step = clipscale_step(pairs, chunks, device) if side == "clipscale" else open_clip_step(pairs, chunks, device)
    step()
    return peak_of(step, device)[0]


def measure(chunks: int, batch: int, device: str, repetitions: int, uncached: Callable[[], float] | None) -> Result:
    pairs = make_pairs(batch, device)
    sides = {"clipscale": clipscale_step(pairs, chunks, device), "open_clip": open_clip_step(pairs, chunks, device)}
    if uncached is not None:
        sides |= {"kept": clipscale_step(pairs, chunks, device, keep=True), "uncached": uncached}
    first = {side: step() for side, step in sides.items()}
    for side in ("open_clip", "clipscale"):
        assert abs(first[side] - first["clipscale"]) < 1e-3, f"the sides do not compute the same loss: {first}"
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(repetitions):  # taking turns: whatever else the machine does hits all sides
        for side, step in sides.items():
            times[side].append(seconds_of(step, device))
    seconds = {side: median(each) for side, each in times.items()}
    context = multiprocessing.get_context("forkserver")
    peaks = {}
    for side in ("clipscale", "open_clip"):
        with context.Pool(1) as fresh:
            peaks[side] = fresh.apply(peak_mb, (side, chunks, batch, device))
    return Result(
        chunks,
        batch,
        batch / seconds["clipscale"],
        batch / seconds["open_clip"],
        seconds["open_clip"] / seconds["clipscale"],
        peaks["clipscale"],
        peaks["open_clip"],
        seconds["kept"] / seconds["uncached"] if uncached is not None else None,
    )


def results(cases: list[tuple[int, int, int]], device: str) -> Iterator[Result]:
    """For every (chunks, batch, repetitions). The uncached step is only run where its graph is small."""
    for chunks, batch, repetitions in cases:
        small = batch <= 256
        uncached = uncached_step(make_pairs(batch, device), device) if small else None
        yield measure(chunks, batch, device, repetitions, uncached)


def show(found: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("chunks", "batch", "clipscale /s", "open_clip /s", "ratio", "peak MB", "its peak MB", "vs uncached")
    for each in found:
        uncached = "" if each.uncached_ratio is None else f"{each.uncached_ratio:.2f}"
        table.add_row(
            str(each.chunks), str(each.global_batch), f"{each.clipscale_samples_per_s:.1f}",
            f"{each.open_clip_samples_per_s:.1f}", f"{each.ratio:.2f}x", f"{each.clipscale_peak_mb:.0f}",
            f"{each.open_clip_peak_mb:.0f}", uncached,
        )  # fmt: skip
    Console().print(table)


def plot(found: list[Result], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, field, label in zip(axes, ("samples_per_s", "peak_mb"), ("samples/s", "peak memory, MB"), strict=True):
        for side in ("clipscale", "open_clip"):
            values = [getattr(each, f"{side}_{field}") for each in found]
            axis.plot([each.chunks for each in found], values, marker="o", label=side)
        axis.set_xscale("log", base=2)
        axis.set(xlabel=f"chunks of a global batch of {found[0].global_batch}", ylabel=label, ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small case, under 50 s on 2 cores")
    parser.add_argument("--json", action="store_true", help="one object a line and nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--chunks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    cases = [(8, 64, 3)] if args.quick else [(chunks, args.batch, args.repetitions) for chunks in args.chunks]
    found = []
    for each in results(cases, args.device):
        found.append(each)
        if args.json:
            print(json.dumps(asdict(each)), flush=True)
    if not args.json:
        show(found)
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
