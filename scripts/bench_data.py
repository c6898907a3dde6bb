"""Samples per second and core, from shards of ordinary JPEGs to training tensors: clipscale beside open_clip's loader.

JPEGs of 500 to 1000 pixels a side are drawn at bench time and packed into shards. Three loaders then make batches of
the same size from them on one core, in this process, in turns: clipscale's (as configured by default, with open_clip's
random crop), open_clip's own (`open_clip_train.data`), and plain webdataset with torchvision's transforms. clipscale
hands over uint8, as its training does (the division by the deviation is the device's work); open_clip and torchvision
hand over normalised floats. The last lines measure memory and open files of clipscale over 20 short epochs.

    python scripts/bench_data.py --quick --json
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import open_clip
import psutil
import torch
from PIL import Image
from torchvision import transforms
from webdataset.compat import WebDataset

from clipscale.config.data import CropAugment, TextCaption
from clipscale.config.schema import Model
from clipscale.data.assign import Order
from clipscale.data.decode import Decoder
from clipscale.data.index import ShardIndex
from clipscale.data.loader import TrainLoader
from clipscale.data.locations import expand_shards
from clipscale.data.mixture import Mixture
from clipscale.data.write import ShardWriter
from clipscale.model.towers import Tokenize, resolve_architecture

SIZE, BATCH, NUM_SHARDS, STREAMS = 224, 32, 4, 4
SCALE = (0.9, 1.0)  # open_clip's random crop
MEAN, DEVIATION = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD

Loader = Callable[[], Iterator[int]]
"""A function that starts a loader; it yields the number of samples of each batch, endlessly."""


def photographs(count: int) -> list[bytes]:
    """JPEGs of 500 to 1000 pixels a side: soft colours, edges and grain, of about the weight of web photographs."""
    random = np.random.default_rng(0)
    files = []
    for _ in range(count):
        width, height = (int(side) for side in random.integers(500, 1001, 2))
        coarse = random.integers(0, 256, (height // 24, width // 24, 3), np.uint8)
        soft = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        grain = random.integers(-9, 10, (height, width, 1), np.int16)
        pixels = (np.asarray(soft, np.int16) + grain).clip(0, 255).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "JPEG", quality=90)
        files.append(stream.getvalue())
    return files


def write_shards(folder: Path, count: int, distinct: int) -> str:
    files = photographs(distinct)
    with ShardWriter(folder, count // NUM_SHARDS) as writer:
        for number in range(count):
            caption = f"a photograph of something, number {number} of many"
            writer.write(f"{number:06d}", {"jpg": files[number % distinct], "txt": caption.encode()})
    return str(folder / f"shard-{{000000..{NUM_SHARDS - 1:06d}}}.tar")


def clipscale_mixture(shards: str, size: int = SIZE) -> Mixture:
    index = ShardIndex.scan(expand_shards(shards))
    decoder = Decoder(size, CropAugment("crop", scale=SCALE), TextCaption("text"), draft=True)
    return Mixture.of(index, Order(index.counts, 0, STREAMS, 64), decoder, BATCH)


def clipscale_loader(shards: str) -> Loader:
    mixture = clipscale_mixture(shards)
    model = Model("ViT-B-32")
    tokenize = Tokenize(model, resolve_architecture(model))

    def start() -> Iterator[int]:
        with TrainLoader(mixture, tokenize) as loader:
            for batch in loader:
                yield len(batch.images)

    return start


def open_clip_loader(shards: str, count: int) -> Loader:
    from open_clip_train import data as theirs

    # webdataset 1.0 marks the end of a shard with an empty sample, on which open_clip 3.3's grouping fails.
    theirs.tar_file_expander = partial(theirs.tar_file_expander, eof_value=None)
    logging.getLogger().setLevel(logging.ERROR)
    preprocess = open_clip.image_transform(SIZE, is_train=True, mean=MEAN, std=DEVIATION)
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    options = SimpleNamespace(
        train_data=shards,
        train_num_samples=count,
        train_data_upsampling_factors=None,
        dataset_resampled=False,
        batch_size=BATCH,
        workers=0,
        world_size=1,
        seed=0,
    )

    def start() -> Iterator[int]:
        epoch = 0
        while True:
            data = theirs.get_wds_dataset(options, preprocess, is_train=True, epoch=epoch, tokenizer=tokenizer)
            for images, _ in data.dataloader:
                yield len(images)
            epoch += 1

    return start


def webdataset_loader(shards: str) -> Loader:
    preprocess = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, scale=SCALE, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )
    tokenizer = open_clip.get_tokenizer("ViT-B-32")

    def start() -> Iterator[int]:
        while True:
            data: Any = WebDataset(shards, shardshuffle=False).shuffle(100).decode("pilrgb")
            pairs = data.to_tuple("jpg", "txt").map_tuple(preprocess, lambda text: tokenizer(text)[0])
            for images, _ in pairs.batched(BATCH, partial=False):
                yield len(images)

    return start


def samples_per_s(batches: Iterator[int], seconds: float) -> float:
    start, count = time.perf_counter(), 0
    while (took := time.perf_counter() - start) < seconds:
        count += next(batches)
    return count / took


def compare(loaders: dict[str, Loader], rounds: int, seconds: float) -> dict[str, float]:
    """The median of several rounds of each, in turns, so that a busy machine is busy for all of them."""
    running = {name: start() for name, start in loaders.items()}
    for batches in running.values():
        next(batches)  # imports, buffers
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for _ in range(rounds):
        for name, batches in running.items():
            rates[name].append(samples_per_s(batches, seconds))
    return {name: median(found) for name, found in rates.items()}


def soak(shards: str, epochs: int = 20) -> dict[str, float]:
    """Growth of memory and of open files from the second to the last of so many epochs, with small images."""
    process = psutil.Process()
    mixture = clipscale_mixture(shards, 32)
    steps = mixture.num_samples // BATCH
    memory, files = [], []
    with TrainLoader(mixture, lambda captions: torch.zeros(len(captions), 1, dtype=torch.int64)) as loader:
        for _ in range(epochs):
            for _ in range(steps):
                next(loader)
            memory.append(process.memory_info().rss / 1e6)
            files.append(process.num_fds())
    return {"memory_growth_mb": memory[-1] - memory[1], "descriptor_growth": files[-1] - files[1]}


def measure(*, quick: bool) -> dict[str, Any]:
    count, distinct, rounds, seconds = (256, 48, 3, 2.0) if quick else (2048, 512, 5, 10.0)
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder) / "shards", count, distinct)
        rates = compare(
            {
                "clipscale": clipscale_loader(shards),
                "open_clip": open_clip_loader(shards, count),
                "webdataset": webdataset_loader(shards),
            },
            rounds,
            seconds,
        )
        small = write_shards(Path(folder) / "small", 64, 16)
        found: dict[str, Any] = {f"{name}_per_s": round(rate, 1) for name, rate in rates.items()}
        return found | {"ratio": round(rates["clipscale"] / rates["open_clip"], 3), **soak(small)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 seconds")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    found = measure(quick=options.quick)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:20} {value:10,.2f}")


if __name__ == "__main__":
    main()
