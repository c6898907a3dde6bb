"""What can be said of an experiment without its data, its weights or its ranks."""

from __future__ import annotations

import torch

from clipscale.config.schema import Config, DeepSpeedEngine, HsdpEngine
from clipscale.config.support import unsupported
from clipscale.data.assign import sharing_faults
from clipscale.errors import ConfigError, listed
from clipscale.model.towers import Towers, resolve_architecture
from clipscale.optim.groups import treatments


def check(config: Config, ranks: int | None) -> None:
    """Raises `ConfigError` with every fault. The towers are built without memory, so that rules meet their names."""
    faults = unsupported(config, ranks or _any_ranks(config))
    if ranks:
        faults += sharing_faults(streams=config.data.streams, global_batch=config.train.global_batch, world_size=ranks)
    try:
        with torch.device("meta"):
            towers = Towers(resolve_architecture(config.model), config.model, config.loss)
        treatments(towers, config.optim, towers.depths())
    except ConfigError as fault:
        faults.append(str(fault))
    if faults:
        raise ConfigError(listed("this run cannot work", faults))


def _any_ranks(config: Config) -> int:
    """A number of ranks that the engine's groups divide, for when none is asked about."""
    match config.engine:
        case HsdpEngine(shard_group=group) | DeepSpeedEngine(hpz_group=group):
            return group or 1
        case _:
            return 1
