"""From the order of samples to a rank's batches, and to a finite pass for evaluation.

A rank's streams are dealt out to its workers. For every step each worker makes the rows of its own streams; the loader
puts them together by slot, so that a rank's batch does not depend on the number of workers, not even in its order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from clipscale.data.captions import Unusable
from clipscale.data.decode import Decoder
from clipscale.data.index import ShardIndex
from clipscale.data.mixture import Mixture
from clipscale.data.streams import Drop, Part, StreamWork, Tokenize
from clipscale.data.workers import Workers, check_shared_memory


@dataclass(frozen=True)
class Batch:
    """One rank's share of one step, its rows in the order that they have in the global batch."""

    images: UInt8[Tensor, "n 3 size size"]
    tokens: Int64[Tensor, "n length"]
    keys: list[str]  # "shard-stem/key"
    epoch: float  # rows filled after this step / samples
    cursors: dict[int, int]  # of this rank's streams, after this batch
    dropped: Counter[Drop]  # samples left out since the batch before
    read_s: float = 0.0  # spent by this rank's workers on fetching and reading shards, and
    decode_s: float = 0.0  # on images and captions, side by side
    concepts: Int64[Tensor, "n"] | None = None  # a number per sample, where the loader was given a `concept` field


class TrainLoader:
    """Endless batches of one rank, from `start_step` on. Use it in a `with` block, or call `close`.

    `workers` processes make them (0: this one does; more than the rank has streams are not started). `cursors` resume
    every stream where the batch of step `start_step - 1` left it; those of other ranks' streams are allowed.
    `mixture` and `world_size` have passed `assign.check`.

    Raises `ConfigError` if shared memory is too small for the batches under way; and `DataError` from `next` where a
    shard cannot be read, where of the samples that a worker has seen (250 or more) over `max_bad_fraction` are
    unusable, and where a stream finds no usable sample in a whole pass.
    """

    def __init__(
        self,
        mixture: Mixture,
        tokenize: Tokenize,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        cursors: Mapping[int, int] | None = None,
        start_step: int = 0,
        max_bad_fraction: float = 1.0,
        concept: str = "",
        pin_memory: bool = False,
    ) -> None:
        assert mixture.global_batch % world_size == 0
        assert mixture.streams % world_size == 0
        assert cursors is not None or start_step == 0
        self.step = start_step  # of the next batch
        self._mixture, self._world_size = mixture, world_size
        self._pin_memory, self._concept = pin_memory, concept
        cursors = mixture.start() if cursors is None else cursors
        mine = {number: cursors[number] for number in mixture.owned(rank, world_size)}
        self.workers = min(workers, len(mine))  # one without a stream would have nothing to do
        if self.workers:
            check_shared_memory(mixture.global_batch // world_size * 3 * mixture.size**2)
        work = StreamWork(mixture, tokenize, mine, start_step, max_bad_fraction, concept)
        self._parts: Workers[Part] = Workers(work, self.workers)

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        batch = self._merged([next(self._parts) for _ in range(max(1, self.workers))])
        self.step += 1
        return batch

    def close(self) -> None:
        """End the workers. May be called again."""
        self._parts.close()

    def __enter__(self) -> TrainLoader:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _fault: object, _trace: TracebackType | None) -> None:
        self.close()

    def _merged(self, parts: list[Part]) -> Batch:
        """The workers' parts as one batch; the rank's rows are `world_size` apart."""
        global_batch = self._mixture.global_batch
        num_rows = global_batch // self._world_size
        images, tokens = (
            torch.empty((num_rows, *like.shape[1:]), dtype=like.dtype, pin_memory=self._pin_memory)
            for like in (parts[0].images, parts[0].tokens)
        )
        concepts = torch.zeros(num_rows, dtype=torch.int64)
        keys = [""] * num_rows
        for part in parts:
            rows = [row // self._world_size for row in part.rows]
            images[rows], tokens[rows], concepts[rows] = part.images, part.tokens, part.concepts
            for row, key in zip(rows, part.keys, strict=True):
                keys[row] = key
        return Batch(
            images,
            tokens,
            keys,
            epoch=(self.step + 1) * global_batch / self._mixture.num_samples,
            cursors={stream: cursor for part in parts for stream, cursor in part.cursors.items()},
            dropped=sum((part.dropped for part in parts), Counter()),
            read_s=sum(part.read_s for part in parts),
            decode_s=sum(part.decode_s for part in parts),
            concepts=concepts if self._concept else None,
        )


@dataclass(frozen=True)
class EvalBatch:
    """Some samples of an evaluation pass."""

    images: UInt8[Tensor, "n 3 size size"]
    captions: list[str]
    keys: list[str]  # "shard-stem/key"
    dropped: dict[str, int]  # reason -> samples dropped among these


def eval_samples(
    index: ShardIndex, decoder: Decoder, *, batch: int, rank: int = 0, world_size: int = 1, workers: int = 0
) -> Iterator[EvalBatch]:
    """One pass over the samples i with i mod `world_size` = `rank`, in order, `batch` at most at a time.

    Ranks may get unequal numbers of samples and of batches; a batch whose samples are all unusable comes empty.
    """
    work = _EvalWork(index, decoder, range(rank, index.num_samples, world_size), batch)
    with closing(Workers(work, min(workers, -(-len(work.numbers) // batch)))) as found:
        yield from found


@dataclass
class _EvalWork:
    """Batch after batch of the samples `numbers`."""

    index: ShardIndex
    decoder: Decoder
    numbers: range
    batch: int
    at: str = "the start"

    def items(self, share: slice) -> Iterator[EvalBatch]:
        for start in range(0, len(self.numbers), self.batch)[share]:
            yield self._batch(self.numbers[start : start + self.batch])

    def _batch(self, numbers: range) -> EvalBatch:
        images = [torch.empty(0, 3, self.decoder.size, self.decoder.size, dtype=torch.uint8)]
        captions, keys, dropped = [], [], Counter[str]()
        for shard, positions in self.index.pieces(numbers):
            for sample in self.index.read(shard, positions):
                self.at = f"{self.index.shards[shard].stem}/{sample.key}"
                try:
                    image, caption = self.decoder(sample.members)
                except Unusable as fault:
                    dropped[fault.reason] += 1
                    continue
                images.append(image[None])
                captions.append(caption)
                keys.append(self.at)
        return EvalBatch(torch.cat(images), captions, keys, dict(dropped))
