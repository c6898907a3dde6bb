"""From the [data] table to the mixture that is trained on, with every fault of every source at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from clipscale.config.data import Data, DataSource
from clipscale.config.plan import Plan
from clipscale.config.schema import Config
from clipscale.data import assign
from clipscale.data.counts import stated_counts
from clipscale.data.decode import Decoder
from clipscale.data.index import Report, Shard, ShardIndex
from clipscale.data.index_file import counted
from clipscale.data.locations import expand_shards, is_table
from clipscale.data.mixture import Mixture, Source, share_out
from clipscale.data.store import PIPE, Store, is_remote
from clipscale.data.tables import table_shards
from clipscale.errors import ConfigError, DataError


@dataclass(frozen=True)
class Found:
    """One source's shards. `counted`: where not, they are drawn with replacement."""

    spec: DataSource
    index: ShardIndex
    counted: bool
    rows: int  # of each global batch
    how: str  # where the counts come from, for the log


def store_of(data: Data) -> Store:
    """Where remote shards are kept."""
    return Store(data.cache_dir, data.cache_bytes, data.timeout_s)


def find_sources(config: Config, report: Report | None = None) -> list[Found]:
    """Looks at every shard of every source. Raises `ConfigError` or `DataError` with the faults of all of them."""
    data, store = config.data, store_of(config.data)
    specs = data.sources or (DataSource("", data.shards, index=data.index),)
    rows = share_out([spec.weight for spec in specs], config.train.global_batch, data.streams)
    found, faults = [], list[ConfigError | DataError]()
    for spec, share in zip(specs, rows, strict=True):
        try:
            index, counted, how = _look(spec, data, store, report)
            found.append(Found(spec, index, counted, share, how))
        except (ConfigError, DataError) as fault:
            faults.append(fault)
    if len(faults) == 1 and len(specs) == 1:
        raise faults[0]
    if faults:
        raise type(faults[0])("\n".join(map(str, faults)))
    return found


def _look(spec: DataSource, data: Data, store: Store, report: Report | None) -> tuple[ShardIndex, bool, str]:
    """-> a source's index, whether its samples are counted, and by what."""
    paths = expand_shards(spec.shards, store)
    tables = [path for path in paths if is_table(path)]
    tars = [path for path in paths if not is_table(path)]
    listed = [shard for path in tables for shard in table_shards(path, data.table)]
    if data.sampling == "resampled":
        if tables:
            raise ConfigError("data.sampling = 'resampled' draws tar shards; rows of a table are always counted")
        return _uncounted(tars, store), False, "shards drawn with replacement"
    if not tars:
        return ShardIndex(tuple(listed), store), True, "rows of the table"
    pipes = any(path.startswith(PIPE) for path in tars)
    if pipes and not spec.index:
        if data.sampling == "exact":
            raise ConfigError(
                "data.sampling = 'exact': what a command (pipe:) will give cannot be counted beforehand; "
                "run `clipscale data index` on it once and name the index in data.index"
            )
        if tables:
            raise ConfigError("data.shards: a table and a pipe: cannot be mixed in one source; use [[data.sources]]")
        return _uncounted(tars, store), False, "shards drawn with replacement, as a pipe: cannot be counted beforehand"
    remote = all(is_remote(path) for path in tars) and not spec.index
    if remote and len(stated := stated_counts(tars, store)) == len(tars):
        counts = {path: count for path, (count, _) in stated.items()}
        index, how = _trusted(tars, counts, store), f"counted by {next(iter(stated.values()))[1]}"
    else:
        index, how = counted(tars, store, named=spec.index, report=report)
    return ShardIndex((*index.shards, *listed), store), True, how


def _uncounted(paths: Sequence[str], store: Store) -> ShardIndex:
    return ShardIndex(tuple(Shard(path, 0, 0) for path in paths), store)


def _trusted(paths: Sequence[str], counts: dict[str, int], store: Store) -> ShardIndex:
    """Remote shards by the counts of `sizes.json` or img2dataset; each is looked at when it is first needed."""
    for path in {paths[0], paths[len(paths) // 2], paths[-1]}:
        store.stat(path)
    return ShardIndex(tuple(Shard(path, counts[path], 0) for path in paths), store)


def data_faults(config: Config, found: Sequence[Found], world_size: int) -> list[str]:
    """Everything that keeps these sources from being shared out among the ranks."""
    data, batch = config.data, config.train.global_batch
    faults = []
    for source in found:
        counts = source.index.counts if source.counted else (max(data.epoch_samples, batch, data.streams),)
        of = f"data source {source.spec.name!r}: " if source.spec.name else ""
        if not source.rows:
            faults.append(
                f"{of}its weight {source.spec.weight:g} is less than a share of {batch:,} can be (shares are multiples "
                f"of gcd(train.global_batch, data.streams)): raise it, or choose data.streams with a smaller divisor"
            )
        if of and sum(counts) < source.rows:
            faults.append(f"{of}its {sum(counts):,} samples do not fill its {source.rows:,} rows of one global batch")
        rows = min(source.rows or batch, sum(counts)) // world_size * world_size if of else batch
        faults += [
            of + fault for fault in assign.check(counts, streams=data.streams, global_batch=rows, world_size=world_size)
        ]
    if data.sources and batch % world_size:
        faults.append(f"train.global_batch = {batch:,} cannot be shared by {world_size:,} ranks")
    if not all(source.counted for source in found) and not data.epoch_samples:
        faults.append(
            "data.epoch_samples is missing: shards drawn with replacement have no end, "
            "so say after how many samples an epoch is to be counted"
        )
    return list(dict.fromkeys(faults))


def eval_faults(config: Config) -> list[str]:
    """Evaluations whose shards are not there: said at the start, not after the last step."""
    faults = []
    for spec in config.eval:
        try:
            expand_shards(spec.shards, store_of(config.data))
        except (ConfigError, DataError) as fault:
            faults.append(f"[[eval]] {spec.name!r}: {fault}")
    return faults


def epoch_source(data: Data) -> int:
    return next((place for place, source in enumerate(data.sources) if source.name == data.epoch), 0)


def mix(config: Config, found: Sequence[Found], size: int) -> Mixture:
    """The mixture; `size`: side of the images."""
    data, seed = config.data, config.run.seed
    sources = []
    for source in found:
        caption = source.spec.caption or data.caption
        decoder = Decoder(size, data.augment, caption, seed=seed, max_pixels=data.max_pixels, draft=data.draft)
        if source.counted:
            order = assign.Order(source.index.counts, seed, data.streams, data.shuffle_block)
        else:
            num_shards = len(source.index.shards)
            order = assign.Resampled(num_shards, seed, data.streams, data.epoch_samples, data.shuffle_block)
        sources.append(Source(source.index, order, decoder, source.rows, source.spec.name))
    return Mixture(tuple(sources), epoch_source(data), data.epoch_samples)


def epoch_samples(config: Config, found: Sequence[Found]) -> int:
    """Samples of the mixture that make an epoch; at least 1."""
    if config.data.epoch_samples:
        return config.data.epoch_samples
    source = found[epoch_source(config.data)]
    return max(1, -(-source.index.num_samples * config.train.global_batch // max(1, source.rows)))


def data_lines(found: Sequence[Found], mixture: Mixture, plan: Plan, data: Data) -> list[str]:
    """The pre-flight's findings, for the log."""
    lines = []
    for source in found:
        name = f"{source.spec.name}: " if source.spec.name else ""
        counted = source.index.summary() if source.counted else f"{len(source.index.shards):,} shards, samples unknown"
        lines.append(f"{name}{counted}; {source.how}")
        if len(found) > 1:
            passes = f", {_passes(source, plan):.2f} passes" if source.counted else ""
            share, asked = source.rows / plan.global_batch, source.spec.weight / sum(s.spec.weight for s in found)
            rows = f"{source.rows:,} of {plan.global_batch:,} rows of each batch"
            lines.append(f"  {rows} ({share:.2%}; asked {asked:.2%}){passes}")
        lines += _cache_lines(source.index, data)
    workers = min(data.workers, len(mixture.owned(0, plan.world_size)))
    lines.append(
        f"{mixture.streams:,} streams over {plan.world_size:,} rank(s) with {workers:,} worker(s) each; "
        f"an epoch is {mixture.num_samples:,} samples, {mixture.num_samples / plan.global_batch:,.1f} steps"
    )
    if plan.epochs < 1 and all(source.counted for source in found):
        lines.append(f"the training ends before a whole pass: {1 - plan.epochs:.0%} of the samples will not be used")
    return lines


def _passes(source: Found, plan: Plan) -> float:
    return plan.total_steps * source.rows / max(1, source.index.num_samples)


def _cache_lines(index: ShardIndex, data: Data) -> list[str]:
    """Whether the cache holds the remote shards, and if not, what that costs."""
    remote = [shard for shard in index.shards if is_remote(shard.path)]
    size = sum(shard.num_bytes for shard in remote)
    if not size:
        return []
    bound = f"{size / 1e9:,.1f} GB remote, data.cache_bytes = {data.cache_bytes / 1e9:,.1f} GB"
    if size <= data.cache_bytes:
        return [f"{bound}: read once, from the second epoch on from this machine's disk"]
    if data.cache_bytes < data.streams * size / len(remote):
        return [
            f"{bound}: fewer shards than the {data.streams:,} streams read at a time, so that shards will be fetched "
            "again and again; raise data.cache_bytes or lower data.streams"
        ]
    return [f"{bound}: every epoch fetches them anew"]
