"""Time and memory of one loss with all its gradients: clipscale's tiles beside open_clip's ClipLoss under autograd.

One process, fp32 features of unit length, the scale at its highest (100). Every measurement has a process of its own.
Peak memory is what it holds at its worst beyond its inputs, gradients included: on the CPU resident memory as the
kernel counts it (VmHWM, set back right before the call; Linux with glibc), on CUDA the allocator's count. Seconds are
the median of several calls, after one that measures memory; where that one is slow, it is the only one.

    python scripts/bench_loss.py --quick --json
    python scripts/bench_loss.py --plot loss.png
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.dist.world import World
from clipscale.loss.contrastive import contrastive_loss

QUICK = {"tiled": [1024, 2048, 4096, 8192], "open_clip": [1024, 2048, 4096, 8192]}
FULL = {"tiled": [1024, 2048, 4096, 8192, 16384, 32768, 65536], "open_clip": [1024, 2048, 4096, 8192, 16384]}
DENSE_MATRICES = 7  # that autograd holds at once: an estimate, to skip what does not fit rather than be killed
MB = 1e6


@dataclass(frozen=True)
class Measurement:
    n: int
    d: int
    path: str
    seconds: float
    peak_mb: float


def tiled(image: Tensor, text: Tensor, log_scale: Tensor) -> Callable[[], object]:
    world = World(0, 1, image.device)
    return lambda: contrastive_loss(image, text, log_scale, world)


def open_clip(image: Tensor, text: Tensor, log_scale: Tensor) -> Callable[[], object]:
    from open_clip.loss import ClipLoss

    loss, leaves = ClipLoss(), [x.requires_grad_() for x in (image, text, log_scale)]
    return lambda: torch.autograd.grad(loss(image, text, log_scale.exp()), leaves)


def measure(path: str, n: int, d: int, device: str, at_least_s: float) -> Measurement:
    """Runs in a fresh process. Repeats until `at_least_s` have passed, five times at most."""
    torch.manual_seed(0)
    call_of = {"tiled": tiled, "open_clip": open_clip}[path]
    log_scale = torch.tensor(100.0, device=device).log()

    def call_for(rows: int) -> Callable[[], object]:
        image = F.normalize(torch.randn(rows, d, device=device), dim=1)
        text = F.normalize(image + 1.5 * F.normalize(torch.randn(rows, d, device=device), dim=1), dim=1)
        return call_of(image, text, log_scale.clone())

    call_for(min(n, 512))()  # libraries set up their buffers
    call, times = call_for(n), []
    peak_mb, first_s = peak_of(call, device)
    while first_s < at_least_s and sum(times) < at_least_s and len(times) < 5:
        times.append(seconds_of(call, device))
    return Measurement(n, d, path, median(times or [first_s]), peak_mb)


def seconds_of(call: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_of(call: Callable[[], object], device: str) -> tuple[float, float]:
    """Megabytes that `call` needs at its worst beyond what is held before it, and its seconds."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = seconds_of(call, device)
        return (torch.cuda.max_memory_allocated() - before) / MB, seconds
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what is free but resident would be used uncounted
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
    before = resident("VmRSS")
    seconds = seconds_of(call, device)
    return (resident("VmHWM") - before) / MB, seconds


def resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def fits(path: str, n: int, device: str) -> bool:
    if path != "open_clip":
        return True
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    return DENSE_MATRICES * 4 * n * n < free


def measurements(sizes: dict[str, list[int]], d: int, device: str, at_least_s: float) -> Iterator[Measurement]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "open_clip.loss", "clipscale.loss.contrastive"])
    for n in sorted({n for each in sizes.values() for n in each}):
        for path in sizes:
            if n in sizes[path] and fits(path, n, device):
                with context.Pool(1) as fresh:
                    yield fresh.apply(measure, (path, n, d, device, at_least_s))


def show(results: list[Measurement]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("N", "d", "path", "seconds", "peak MB", title="one loss with gradients")
    for each in results:
        table.add_row(str(each.n), str(each.d), each.path, f"{each.seconds:.3f}", f"{each.peak_mb:.0f}")
    Console().print(table)


def plot(results: list[Measurement], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axis, field, label in zip(
        axes, ("seconds", "peak_mb"), ("seconds", "peak memory above inputs, MB"), strict=True
    ):
        for path in dict.fromkeys(each.path for each in results):
            mine = [each for each in results if each.path == path]
            axis.loglog(
                [each.n for each in mine], [getattr(each, field) for each in mine], marker="o", label=path, base=2
            )
        axis.set(xlabel=f"global batch (d = {results[0].d})", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="up to N = 8,192, under 50 s on 2 cores")
    parser.add_argument("--json", action="store_true", help="one object a line and nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE.png")
    parser.add_argument("--d", type=int, default=512, help="width of the features")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    results = []
    for each in measurements(QUICK if args.quick else FULL, args.d, args.device, 1.0 if args.quick else 5.0):
        results.append(each)
        if args.json:
            print(json.dumps(asdict(each)), flush=True)
    if not args.json:
        show(results)
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
