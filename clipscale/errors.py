"""The error tree: one family per kind of fault, one exit code per family.

Everything the world can do wrong (a typo, a lost shard, a run that diverges, a silent rank) ends in one of these. The
command line prints the message and exits with the family's code, without a traceback. Our own mistakes stay `assert`s.
"""

from __future__ import annotations

from collections.abc import Iterable


def listed(headline: str, faults: Iterable[str]) -> str:
    """A message that names every fault at once, a line each."""
    return "\n".join([f"{headline}:", *(f"  - {fault}" for fault in faults)])


class ClipscaleError(Exception):
    """Base of all faults that are reported to the user. The message says what was found, wanted, and to do."""

    exit_code = 1
    on_all_ranks = False  # set where every rank raises this same error, so that one of them may speak for all


class ConfigError(ClipscaleError):
    """The request cannot be carried out as written: configuration, command line, model, output folder."""

    exit_code = 2


class DataError(ClipscaleError):
    """Shards, samples or captions are missing, damaged or too few."""

    exit_code = 3


class DivergedError(ClipscaleError):
    """Loss or gradients are no longer finite."""

    exit_code = 4


class DistributedError(ClipscaleError):
    """A rank died, fell silent, or the ranks disagree."""

    exit_code = 5
