"""From shards to a result: embed what an `[[eval]]` table names, on one rank or many, and score it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from clipscale.config.data import NoAugment, TextCaption
from clipscale.config.schema import Eval, Model, RetrievalEval, ZeroShotEval
from clipscale.data.decode import Decoder
from clipscale.data.index_file import counted
from clipscale.data.loader import EvalBatch, eval_samples
from clipscale.data.locations import expand_shards
from clipscale.data.store import LOCAL, Store
from clipscale.dist.world import World
from clipscale.errors import ConfigError, DataError
from clipscale.evaluate.prompts import collect_classes, embed_classes, load_class_names, load_templates
from clipscale.evaluate.ranks import Result, as_text
from clipscale.evaluate.retrieval import retrieval
from clipscale.evaluate.sheet import contact_sheet
from clipscale.evaluate.zeroshot import best_classes, zeroshot
from clipscale.model.towers import Tokenize, load_exported

_BATCH = 256  # images or captions per forward; no result depends on it


class ForwardEmbedder:
    """Features through any forward that takes (tower, inputs): an engine's, or the bare towers'."""

    def __init__(self, forward: Callable[..., tuple[Tensor, Tensor]], tokenize: Tokenize, device: torch.device) -> None:
        self._forward, self._tokenize, self._device = forward, tokenize, device

    @torch.no_grad()
    def embed_images(self, images: Tensor) -> Tensor:
        return self._forward("image", images.to(self._device))[0].cpu()

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        return self._forward("text", self._tokenize(list(texts)).to(self._device))[0].cpu()


def load_embedder(run: Path, *, ema: bool = False) -> tuple[ForwardEmbedder, int]:
    """The weights in RUN/model, or their average, and the side of the images they take.

    Raises `ConfigError` where there are none.
    """
    folder = run / ("model-ema" if ema else "model")
    if not (folder / "open_clip_config.json").is_file():
        if ema and (run / "model").is_dir():
            raise ConfigError(f"--ema: {run} holds no average of the weights; it was trained without train.ema_decay")
        raise ConfigError(
            f"{run} holds no {folder.name}/ folder: wanted a run folder of `clipscale train` with a checkpoint"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    towers, architecture, size = load_exported(folder)
    return ForwardEmbedder(towers.to(device).eval(), Tokenize(Model(), architecture), device), size


@dataclass(frozen=True)
class Embedded:
    """What one pass over the shards found."""

    features: Tensor  # [n, d]
    texts: list[str]  # the label or the caption of each image
    images: Tensor  # uint8 [m, 3, H, W], a few for looking at
    shown: Tensor  # [m], which rows of `features` they are
    dropped: dict[str, int]


def evaluate(
    spec: Eval,
    embedder: ForwardEmbedder,
    size: int,
    world: World,
    *,
    workers: int = 0,
    class_names: Path | None = None,
    sheet: Path | None = None,
    store: Store = LOCAL,
) -> Result:
    """Communicates. Scores one `[[eval]]` table; every rank gets the same result. Remote shards are kept in `store`.

    `sheet` names a PNG of some images with their five best names (zero-shot only).
    """
    text = ("label", spec.label) if isinstance(spec, ZeroShotEval) else ("caption", spec.caption)
    found = _embed_shards(
        spec.shards, text, embedder, size, world, workers=workers, store=store, look=24 if sheet else 0
    )
    return replace(_score(spec, found, embedder, class_names, sheet), dropped=found.dropped)


def _score(
    spec: Eval, found: Embedded, embedder: ForwardEmbedder, class_names: Path | None, sheet: Path | None
) -> Result:
    if isinstance(spec, RetrievalEval):
        captions, groups = collect_classes(found.texts)
        text_features = _embed_texts(embedder, captions)
        return retrieval(found.features, text_features, groups, torch.arange(len(captions)))
    names, labels = collect_classes(found.texts, load_class_names(class_names) if class_names else None)
    class_features = embed_classes(embedder, names, load_templates(spec.templates), text_chunk=_BATCH)
    if sheet is not None:
        scores, best = best_classes(found.features[found.shown], class_features, k=min(5, len(names)))
        top_names = [[names[index] for index in row] for row in best.tolist()]
        truths = [found.texts[row] for row in found.shown.tolist()]
        contact_sheet(found.images, truths, top_names, scores.tolist(), sheet, f"{spec.name}: the five best names")
    return zeroshot(found.features, labels, class_features)


def _embed_texts(embedder: ForwardEmbedder, texts: Sequence[str]) -> Tensor:
    parts = [embedder.embed_texts(texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH)]
    return torch.cat(parts)


def _embed_shards(
    shards: str | Sequence[str],
    text: tuple[str, str],
    embedder: ForwardEmbedder,
    size: int,
    world: World,
    *,
    workers: int,
    store: Store,
    look: int,
) -> Embedded:
    """Communicates. Ranks take every W-th sample; all hold all results afterwards, in one order.

    `text` is what goes with each image, "label" or "caption", and where it stands.
    """
    what, field = text
    index = world.together("evaluation data", lambda: counted(expand_shards(shards, store), store)[0])
    decoder = Decoder(size, NoAugment("none"), TextCaption("text", field))
    features, texts, keys, pictures, dropped = [], [], [], [], Counter[str]()
    batches = eval_samples(index, decoder, batch=_BATCH, rank=world.rank, world_size=world.size, workers=workers)
    look = min(look, index.num_samples)
    wanted = set(torch.linspace(0, index.num_samples - 1, look).long().tolist()) if look else set()
    seen = 0
    for batch in _in_step(batches, world):
        if batch is not None:
            dropped.update({reason.replace("caption", what): count for reason, count in batch.dropped.items()})
        if batch is None or not batch.keys:  # keeps the other ranks company, whose sharded weights need it
            embedder.embed_images(torch.zeros(1, 3, size, size, dtype=torch.uint8))
            continue
        features.append(embedder.embed_images(batch.images))
        texts += batch.captions
        keys += batch.keys
        pictures += [(seen + row, image) for row, image in enumerate(batch.images) if seen + row in wanted]
        seen += len(batch.keys)
    own = (torch.cat(features) if features else None, texts, keys, dropped)
    everybodys = world.gather_objects(own)
    dropped = sum((part[3] for part in everybodys), Counter())
    everybodys = [part for part in everybodys if part[0] is not None]
    if not everybodys:
        where = shards if isinstance(shards, str) else " ".join(shards)
        fault = DataError(
            f"no usable sample among {index.num_samples:,} in {where}: {as_text(dropped)}. The {what} was looked for "
            f"in {field!r}"
        )
        fault.on_all_ranks = True
        raise fault
    order = sorted((key, rank, row) for rank, part in enumerate(everybodys) for row, key in enumerate(part[2]))
    if world.size == 1:
        order = [(key, 0, row) for row, key in enumerate(keys)]
    return Embedded(
        features=torch.stack([everybodys[rank][0][row] for _, rank, row in order]),
        texts=[everybodys[rank][1][row] for _, rank, row in order],
        images=torch.stack([image for _, image in pictures]) if pictures else torch.empty(0, 3, size, size),
        shown=torch.tensor([row for row, _ in pictures], dtype=torch.long),
        dropped=dict(dropped),
    )


def _in_step(batches: Iterator[EvalBatch], world: World) -> Iterator[EvalBatch | None]:
    """Communicates. All ranks go through equally many rounds; one that has no batch left gets None."""
    while True:
        batch = next(batches, None)
        if world.size > 1:
            more = torch.tensor(batch is not None, dtype=torch.int32)
            dist.all_reduce(more, dist.ReduceOp.MAX, group=world.control)
            if not more:
                return
        elif batch is None:
            return
        yield batch
