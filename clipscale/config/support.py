"""What does not go together, said before anything is built or read: each with its reason and the way out."""

from __future__ import annotations

from clipscale.config.optim import Muon
from clipscale.config.schema import Config, DeepSpeedEngine, HsdpEngine
from clipscale.errors import ConfigError, listed


def unsupported(config: Config, world_size: int) -> list[str]:
    """One line per contradiction; none for a run that can be tried."""
    return [*_engine(config, world_size), *_optimizer(config), *_model(config)]


def require_supported(config: Config, world_size: int) -> None:
    """Raises `ConfigError` with every contradiction."""
    faults = unsupported(config, world_size)
    if faults:
        error = ConfigError(listed("this run cannot work", faults))
        error.on_all_ranks = True  # all read the same file
        raise error


def _engine(config: Config, world_size: int) -> list[str]:
    engine, faults = config.engine, []
    match engine:
        case DeepSpeedEngine():
            if engine.hpz_group and engine.zero_stage != 3:
                faults.append(
                    f"engine.hpz_group: found ZeRO-{engine.zero_stage}, whose weights are whole on every rank anyway; "
                    "set engine.zero_stage = 3, or drop the key"
                )
            elif engine.hpz_group and world_size % engine.hpz_group:
                faults.append(f"engine.hpz_group: {engine.hpz_group} does not divide the {world_size} ranks")
            if engine.offload_optimizer and not engine.zero_stage:
                faults.append(
                    "engine.offload_optimizer: ZeRO-0 shards nothing and DeepSpeed offloads only what it shards; "
                    "set engine.zero_stage to 1, 2 or 3"
                )
            if engine.offload_parameters and engine.zero_stage != 3:
                faults.append(
                    f"engine.offload_parameters: found ZeRO-{engine.zero_stage}, wanted 3: only sharded weights can "
                    "stay on the host"
                )
        case HsdpEngine():
            if world_size % engine.shard_group:
                divisors = [str(size) for size in range(1, world_size + 1) if world_size % size == 0]
                faults.append(
                    f"engine.shard_group: {engine.shard_group} does not divide the {world_size} ranks; "
                    f"wanted one of {', '.join(divisors)}"
                )
        case _:
            pass
    return faults


def _optimizer(config: Config) -> list[str]:
    if not isinstance(config.optim, Muon):
        return []
    engine = config.engine
    sharded = engine.kind == "hsdp" or (engine.kind == "deepspeed" and engine.zero_stage > 0)
    if sharded:
        return [
            "optim.kind = 'muon': it orthogonalises whole matrices, and this engine cuts them up; "
            "use engine.kind = 'plain' (or ZeRO-0), or optim.kind = 'lamb', which works on cut layers"
        ]
    return []


def _model(config: Config) -> list[str]:
    if config.model.compile and config.engine.kind == "hsdp":
        return [
            "model.compile: FSDP2's hooks break a tower's program into pieces, which is not tested here; "
            "set model.compile = false, or engine.kind = 'deepspeed'"
        ]
    return []
