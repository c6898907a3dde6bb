"""How far the batch can grow on the emoji demo: AdamW, LAMB and LARS at the same number of samples.

Every run is `clipscale train configs/emoji.toml` with other settings: an ordinary text tower of two layers, and one
rate for all of it. Finished runs are kept, so an interrupted study goes on where it stopped. Writes results.json,
table.md and study.png into --out.

    python scripts/large_batch_study.py --out runs/study
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BATCHES = (256, 1024, 4096)
BASE_BATCH = 512  # the demo's own, which the rates are meant for
SAMPLES = 163_840  # 640, 160 and 40 steps
TEXT = "{context_length=24, width=128, heads=4, layers=2, mlp_ratio=4.0, norm_kwargs={}}"


@dataclass(frozen=True)
class Recipe:
    name: str
    settings: tuple[str, ...]


# Vectors and the temperature have no trust ratio: under LAMB and LARS they need smaller rates than the matrices do.
RECIPES = (
    Recipe("AdamW", ("optim.kind=adamw", "optim.lr=2e-3")),
    Recipe("AdamW, root of the batch", ("optim.kind=adamw", "optim.lr=2e-3", "optim.lr_rule=sqrt")),
    Recipe("LAMB", ("optim.kind=lamb", "optim.lr=1e-2", "optim.vector_lr_scale=0.1")),
    Recipe(
        "LAMB, root of the batch",
        ("optim.kind=lamb", "optim.lr=1e-2", "optim.lr_rule=sqrt", "optim.vector_lr_scale=0.1"),
    ),
    Recipe(
        "LARS, linear in the batch",
        ("optim.kind=lars", "optim.lr=1.0", "optim.lr_rule=linear", "optim.vector_lr_scale=0.01"),
    ),
)


@dataclass(frozen=True)
class Outcome:
    recipe: str
    batch: int
    lr: float  # the peak, after the batch-size rule
    loss: float | None  # mean of the last tenth of the steps
    artist: float | None  # zero-shot top-1 on the held-out artist; None where the run diverged
    unseen: float | None


def run(recipe: Recipe, batch: int, out: Path, samples: int) -> Outcome:
    folder = out / f"{recipe.name} batch {batch}".replace(" ", "_").replace(",", "")
    settings = (
        f"train.global_batch={batch}",
        f"train.duration.samples={samples}",
        f"model.text_cfg={TEXT}",
        "optim.rules=[]",
        "data.caption.label_only=0.6",
        "optim.warmup.fraction=0.2",
        f"optim.base_batch={BASE_BATCH}",
        *recipe.settings,
    )
    if not (folder / "model").is_dir():
        flags = [word for setting in settings for word in ("--set", setting)]
        command = [sys.executable, "-m", "clipscale", "train", "configs/emoji.toml", "--out", str(folder)]
        subprocess.run([*command, "--auto-resume", *flags], check=False)  # one that diverges has its line, too
    return read(folder, recipe.name, batch)


def read(folder: Path, recipe: str, batch: int) -> Outcome:
    records: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    scores = {record["eval"]: record["top1"] for record in records if "eval" in record and "top1" in record}
    last = [record["loss"] for record in steps[-max(1, len(steps) // 10) :]]
    finite = [loss for loss in last if loss is not None]
    return Outcome(
        recipe,
        batch,
        max(record["lr"] for record in steps),
        sum(finite) / len(finite) if finite else None,
        scores.get("held-out artist"),
        scores.get("unseen concepts"),
    )


def table(outcomes: list[Outcome]) -> str:
    lines = [
        "| optimizer, rule | batch | peak lr | final loss | artist top-1 % | unseen top-1 % |",
        "|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        scores = [f"{100 * score:.1f}" if score is not None else "diverged" for score in (each.artist, each.unseen)]
        loss = f"{each.loss:.2f}" if each.loss is not None else "not finite"
        lines.append(f"| {each.recipe} | {each.batch:,} | {each.lr:.3g} | {loss} | {' | '.join(scores)} |")
    return "\n".join(lines) + "\n"


def plot(outcomes: list[Outcome], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 3.8), layout="constrained")
    for name in dict.fromkeys(each.recipe for each in outcomes):
        mine = [each for each in outcomes if each.recipe == name]
        scores = [100 * (each.artist or 0.0) for each in mine]
        axis.plot([each.batch for each in mine], scores, marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xticks(BATCHES, [f"{batch:,}" for batch in BATCHES])
    axis.set(xlabel=f"global batch ({SAMPLES:,} samples each)", ylabel="held-out artist, top-1 %")
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="fewer, to share the work")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    ordered: list[Outcome] = []
    for batch in sorted(args.batches, reverse=True):
        for recipe in RECIPES:
            outcomes.append(run(recipe, batch, args.out, args.samples))
            (args.out / "results.json").write_text(json.dumps([asdict(each) for each in outcomes], indent=2) + "\n")
            ordered = sorted(outcomes, key=lambda each: (each.recipe, each.batch))
            (args.out / "table.md").write_text(table(ordered))
            plot(ordered, args.out / "study.png")
    print(table(ordered))


if __name__ == "__main__":
    main()
