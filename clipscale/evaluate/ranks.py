"""Where the truth lands in a ranking: the one computation under zero-shot classification and retrieval.

Ties are settled by expectation: every metric is its mean over all orders of the candidates that score the same. A
collapsed model, for which all candidates tie, therefore scores chance exactly, whatever the order of the classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from clipscale.errors import DataError, DivergedError

# Cosines of fp32 features carry about 1e-7 of rounding: a smaller difference than this is noise, not knowledge.
TIE = 1e-6
SCORES_AT_ONCE = 2**22  # 32 MB of float64, and about three times that with the masks


@dataclass(frozen=True)
class Metric:
    """One number beside what a model that knows nothing gets: a `share` in [0, 1], or a `rank` from 1, low is good."""

    name: str
    value: float
    chance: float
    unit: Literal["share", "rank"] = "share"

    @property
    def times_chance(self) -> float:
        """How many times better than chance, for both units."""
        return self.value / self.chance if self.unit == "share" else self.chance / self.value


@dataclass(frozen=True)
class Result:
    """The metrics of one evaluation and the sizes of the sets they were measured on."""

    metrics: tuple[Metric, ...]
    sizes: Mapping[str, int]
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> samples of the set that could not be used

    def as_dict(self) -> dict[str, float | int]:
        """Flat and JSON-able: each metric by name, `chance_` + name, each size, and `dropped_` + reason."""
        return {
            **{metric.name: metric.value for metric in self.metrics},
            **{f"chance_{metric.name}": metric.chance for metric in self.metrics},
            **self.sizes,
            **{f"dropped_{reason}": count for reason, count in self.dropped.items()},
        }


def as_text(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(dropped.items()))


@dataclass(frozen=True)
class Ranks:
    """For each of q queries, where its best true candidate stands among the c candidates (all counts, on the CPU)."""

    above: Int64[Tensor, "q"]  # candidates that score higher, none of them true
    tied: Int64[Tensor, "q"]  # candidates that score the same, itself included
    tied_true: Int64[Tensor, "q"]  # true ones among the tied, at least 1
    true: Int64[Tensor, "q"]  # true ones among all candidates
    num_candidates: int

    def hits(self, k: int) -> Float64[Tensor, "q"]:
        """The probability that a true candidate is among the first k, over all orders of the tied.

        j = k - above places are left for the t tied, m of them true: the hypergeometric
        1 - C(t - m, j) / C(t, j), which is plain 0 or 1 when nothing ties.
        """
        places = (k - self.above).clamp(min=0).minimum(self.tied)
        miss = torch.ones(places.shape, dtype=torch.float64)
        for taken in range(k):
            false_left = (self.tied - self.tied_true - taken).clamp(min=0)
            factor = false_left.double() / (self.tied - taken).clamp(min=1)
            miss = torch.where(taken < places, miss * factor, miss)
        return 1 - miss

    def first(self) -> Float64[Tensor, "q"]:
        """The expected rank, from 1, of the first true candidate: above + (t + 1) / (m + 1)."""
        return self.above + (self.tied + 1).double() / (self.tied_true + 1)

    def blind(self) -> Ranks:
        """The ranks of a model that scores all candidates alike: chance, for every metric made of ranks."""
        nothing, everything = torch.zeros_like(self.above), torch.full_like(self.above, self.num_candidates)
        return Ranks(nothing, everything, self.true, self.true, self.num_candidates)


def rank_truth(
    queries: Float[Tensor, "q d"],
    candidates: Float[Tensor, "c d"],
    query_groups: Int[Tensor, "q"],
    candidate_groups: Int[Tensor, "c"],
    *,
    what: tuple[str, str] = ("query", "candidate"),
    chunk: int | None = None,
) -> Ranks:
    """Rank all candidates by cosine for each query and find its truth: any candidate of the query's own group.

    `chunk` queries are scored at a time (None: as many as keep a score table of 32 MB), so memory is O(chunk * c). The
    counts do not depend on it: scores are float64, whose rounding is far below the tie width of 1e-6, and which no
    TF32 setting touches. `what` names a query and a candidate in errors.

    Raises DivergedError for features that are not finite, DataError for empty sets and for queries without any truth.
    """
    _check_features(queries, what[0])
    _check_features(candidates, what[1])
    device = candidates.device
    query_groups, candidate_groups = query_groups.to(device), candidate_groups.to(device)
    orphans = int((~torch.isin(query_groups, candidate_groups)).sum())
    if orphans:
        raise DataError(
            f"{orphans} of {len(queries)} {what[0]} features have no true {what[1]} among the {len(candidates)} given. "
            f"Give every {what[0]} at least one {what[1]} of its group, or leave it out."
        )
    chunk = chunk or max(1, SCORES_AT_ONCE // len(candidates))
    columns = F.normalize(candidates.double(), dim=1).T
    parts = []
    for rows, groups in zip(queries.split(chunk), query_groups.split(chunk), strict=True):
        scores = F.normalize(rows.to(device).double(), dim=1) @ columns
        parts.append(_count(scores, groups[:, None] == candidate_groups))
    return Ranks(*torch.cat(parts, dim=1).cpu(), num_candidates=len(candidates))  # k x [4, chunk] -> 4 x [q]


def first_k(ks: tuple[int, ...], num_candidates: int) -> Iterator[int]:
    """The k that mean something: beyond the number of candidates every model is always right."""
    return (k for k in ks if k <= num_candidates)


def _count(scores: Float64[Tensor, "r c"], truth: Bool[Tensor, "r c"]) -> Int64[Tensor, "4 r"]:
    """above, tied, tied_true, true of each row."""
    best = scores.masked_fill(~truth, -torch.inf).amax(dim=1, keepdim=True)
    above = scores > best + TIE
    tied = (scores >= best - TIE) & ~above
    return torch.stack([mask.sum(dim=1) for mask in (above, tied, tied & truth, truth)])


def _check_features(features: Float[Tensor, "n d"], what: str) -> None:
    if len(features) == 0:
        raise DataError(f"there is no {what} to evaluate: the set is empty. Check the shards and their filters.")
    broken = int((~features.isfinite().all(dim=1)).sum())
    if broken:
        raise DivergedError(
            f"{broken} of {len(features)} {what} features are not finite: the model has diverged. "
            "Evaluate an earlier checkpoint."
        )
