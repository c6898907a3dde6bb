"""What an optimizer's update costs beside AdamW's, on the layers of a CLIP ViT-B/32 or of a smaller one.

All in one run, taking turns, medians of several. `--json` prints one object a line and nothing else.

    python scripts/bench_optim.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch.optim import Optimizer

from clipscale.config import optim
from clipscale.config.schema import Model, SoftmaxLoss
from clipscale.model.towers import Towers, resolve_architecture
from clipscale.optim.groups import treatments
from clipscale.train.build import bare_optimizer

TABLES: dict[str, optim.Optim] = {
    "adamw": optim.AdamW(kind="adamw", lr=1e-3),
    "lamb": optim.Lamb(kind="lamb", lr=1e-3),
    "lars": optim.Lars(kind="lars", lr=1e-3),
    "lion": optim.Lion(kind="lion", lr=1e-4),
    "sgd": optim.Sgd(kind="sgd", lr=1e-3),
}


@dataclass(frozen=True)
class Measurement:
    optimizer: str
    million_parameters: float
    seconds: float  # one update
    ratio: float  # to AdamW's


def make_towers(layers: int, device: str) -> Towers:
    """With gradients. All optimizers share them: what they hold does not matter here, and memory does."""
    model = Model(name="ViT-B-32")
    architecture = resolve_architecture(model)
    for tower in ("vision_cfg", "text_cfg") if layers else ():
        architecture[tower]["layers"] = layers
    with torch.device("meta"):  # its own random weights would take longer than all the updates
        towers = Towers(architecture, model, SoftmaxLoss("softmax"))
    towers.to_empty(device=device)
    generator = torch.Generator(device=device).manual_seed(0)
    for weight in towers.parameters():
        weight.data.normal_(std=0.02, generator=generator)
        weight.grad = torch.randn(weight.shape, generator=generator, device=device)
    return towers


def timed(update: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    update()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(layers: int, device: str, repetitions: int) -> list[Measurement]:
    towers = make_towers(layers, device)
    made: dict[str, Optimizer] = {
        name: bare_optimizer(table, 1e-6, towers, treatments(towers, table, {})) for name, table in TABLES.items()
    }
    for optimizer in made.values():
        timed(optimizer.step, device)  # makes its state
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repetitions):
        for name, optimizer in made.items():
            seconds[name].append(timed(optimizer.step, device))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    million = sum(weight.numel() for weight in towers.parameters()) / 1e6
    return [Measurement(name, million, median, median / medians["adamw"]) for name, median in medians.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers a tower")
    parser.add_argument("--json", action="store_true", help="one object a line and nothing else")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    results = measure(2 if args.quick else 0, args.device, 5 if args.quick else 15)
    if args.json:
        for each in results:
            print(json.dumps(asdict(each)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("optimizer", "M parameters", "ms", "of AdamW", title="one update")
    for each in results:
        table.add_row(
            each.optimizer, f"{each.million_parameters:.1f}", f"{1000 * each.seconds:.1f}", f"{each.ratio:.2f}x"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
