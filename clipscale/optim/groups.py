"""Which parameter is updated how: rates by tower and depth, decay for matrices only, bounds for the log scale.

All of it is decided by a parameter's name and its shape as the model has it, before any engine flattens or cuts it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from clipscale.config.optim import Muon, Recipe, Rule
from clipscale.errors import ConfigError, listed
from clipscale.optim.segments import trained_parameters

LOG_SCALE = "logits.log_scale"
LOG_SCALE_BOUNDS = (0.0, math.log(100))  # a logit scale of 1 to 100, as in Radford et al. 2021, section 2.5


Depth = tuple[str, int]  # the tower, "image" or "text", and the number of layers above the parameter's own


@dataclass(frozen=True)
class Treatment:
    """How one parameter is updated."""

    kind: str  # "matrices", "vectors" or "log_scale"
    lr_scale: float
    weight_decay: float
    adapt: bool  # whether its layer gets a trust ratio (lamb, lars), or is orthogonalised (muon)
    clamp: tuple[float, float] | None = None

    @property
    def name(self) -> str:
        parts = [self.kind]
        if self.lr_scale != 1:
            parts.append(f"lr x {self.lr_scale:.4g}")
        parts.append(f"decay {self.weight_decay:g}")
        if self.kind == "matrices" and not self.adapt:
            parts.append("not adapted")
        return ", ".join(parts)


def treatments(model: nn.Module, recipe: Recipe, depths: Mapping[str, Depth]) -> dict[str, Treatment]:
    """One for every trained parameter, by name. Raises `ConfigError` for rules that fit no parameter.

    Vectors and scalars (biases, norms, the class token, the log scale) neither decay nor get a trust ratio.
    """
    trained = dict(trained_parameters(model))
    unused = set(range(len(recipe.rules)))
    chosen = {}
    for name, parameter in trained.items():
        rule_index, rule = _first_rule(recipe.rules, name)
        unused.discard(rule_index)
        chosen[name] = _treatment(name, parameter.ndim, recipe, rule, depths.get(name))
    if unused:
        every = [name for name, _ in model.named_parameters()]
        raise ConfigError("\n".join(_unused_rule(recipe.rules, index, every, trained) for index in sorted(unused)))
    return chosen


def _first_rule(rules: Sequence[Rule], name: str) -> tuple[int, Rule]:
    return next(((index, rule) for index, rule in enumerate(rules) if fnmatchcase(name, rule.match)), (-1, Rule("*")))


def _treatment(name: str, ndim: int, recipe: Recipe, rule: Rule, depth: Depth | None) -> Treatment:
    kind = "log_scale" if name == LOG_SCALE else "matrices" if ndim >= 2 else "vectors"
    adapt = kind == "matrices" and not (isinstance(recipe, Muon) and _is_table(name))
    own_decay = recipe.weight_decay if kind == "matrices" else 0.0
    return Treatment(
        kind,
        lr_scale=rule.lr_scale * _depth_scale(recipe, depth) * (1.0 if kind == "matrices" else recipe.vector_lr_scale),
        weight_decay=own_decay if rule.weight_decay is None else rule.weight_decay,
        adapt=adapt if rule.adapt is None else rule.adapt,
        clamp=LOG_SCALE_BOUNDS if kind == "log_scale" else None,
    )


def _is_table(name: str) -> bool:
    """Rows that are looked up, not a matrix that maps one space to another."""
    return name.endswith(("token_embedding.weight", "positional_embedding", "pos_embed", "embeddings.weight"))


def _depth_scale(recipe: Recipe, depth: Depth | None) -> float:
    if depth is None:
        return 1.0
    tower, above = depth
    if tower == "image":
        return recipe.image_lr_scale * recipe.image_layer_decay**above
    return recipe.text_lr_scale * recipe.text_layer_decay**above


def _unused_rule(rules: Sequence[Rule], index: int, every: Iterable[str], trained: Mapping[str, Any]) -> str:
    pattern = rules[index].match
    fitting = [name for name in every if fnmatchcase(name, pattern)]
    if not fitting:
        return f"optim.rules: {pattern!r} fits no parameter; names look like {', '.join(list(trained)[:3])}"
    if not any(name in trained for name in fitting):
        return f"optim.rules: {pattern!r} fits only locked parameters ({fitting[0]}, ...); unlock them or drop the rule"
    earlier = _first_rule(rules, next(name for name in fitting if name in trained))[1].match
    return f"optim.rules: {pattern!r} comes too late: {earlier!r} above takes all it fits; the first that fits counts"


def parameter_groups(model: nn.Module, chosen: Mapping[str, Treatment], lr: float) -> list[dict[str, Any]]:
    """The optimizer's groups: parameters that are treated alike; none is empty.

    `base_lr` is what the schedule's factor multiplies; `clamp` is kept after each update, see `clamp_after_step`.
    """
    members: dict[Treatment, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if name in chosen:
            members.setdefault(chosen[name], []).append(parameter)
    groups = []
    for treatment, parameters in members.items():
        rate = lr * treatment.lr_scale
        group = {"name": treatment.name, "params": parameters, "weight_decay": treatment.weight_decay}
        clamp = {"clamp": treatment.clamp} if treatment.clamp else {}
        groups.append({**group, **clamp, "lr": rate, "base_lr": rate, "adapt": treatment.adapt})
    check_groups(model, groups)
    return groups


def check_groups(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raises `ConfigError` unless every trained parameter is in exactly one group, and no group is empty."""
    counts = Counter(id(parameter) for group in groups for parameter in group["params"])
    found = {name: counts[id(parameter)] for name, parameter in trained_parameters(model)}
    faults = [f"{name} is in {count} groups, wanted one" for name, count in found.items() if count != 1]
    faults += [f"group {group['name']!r} is empty" for group in groups if not group["params"]]
    if faults:
        raise ConfigError(listed("the optimizer's groups are wrong", faults))


def clamp_after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A step hook: keeps each group with a `clamp` within its bounds.

    Done where the optimizer works, on its own copy: under ZeRO that is a flat partition, which DeepSpeed copies back to
    the model afterwards. A clamp inside the forward would stick above the bound, for want of a gradient.
    """
    with torch.no_grad():
        for group in optimizer.param_groups:
            if "clamp" in group:
                for parameter in group["params"]:
                    parameter.clamp_(*group["clamp"])
