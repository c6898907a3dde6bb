"""`[optim]`: the optimizers, their schedules, and which parameter is updated how."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from clipscale.config.values import STRICT, Beta, Count, Duration, NonNegative, Positive, PositiveShare, Share


@dataclass(frozen=True)
class CosineSchedule:
    """Half a cosine from the warm-up's end to the end of training (Loshchilov and Hutter 2017)."""

    __pydantic_config__ = STRICT
    kind: Literal["cosine"]
    final: Share = 0.0  # as a share of lr


@dataclass(frozen=True)
class PolynomialSchedule:
    """(1 - progress) ** power from the warm-up's end on; the LAMB paper uses power 1."""

    __pydantic_config__ = STRICT
    kind: Literal["polynomial"]
    power: Positive = 1.0
    final: Share = 0.0


@dataclass(frozen=True)
class ConstantSchedule:
    """The full rate, and if wanted a polynomial cooldown at the end of training."""

    __pydantic_config__ = STRICT
    kind: Literal["constant"]
    cooldown: Duration | None = None
    power: Positive = 1.0
    final: Share = 0.0


@dataclass(frozen=True)
class WarmupStableDecaySchedule:
    """The full rate, then 1 - sqrt(progress) over the last part of training (Hägele et al. 2024)."""

    __pydantic_config__ = STRICT
    kind: Literal["wsd"]
    decay: Duration = field(default_factory=lambda: Duration(fraction=0.2))
    final: Share = 0.0


Schedule = Annotated[
    CosineSchedule | PolynomialSchedule | ConstantSchedule | WarmupStableDecaySchedule, Field(discriminator="kind")
]


@dataclass(frozen=True)
class Rule:
    """Parameters whose name fits `match` (shell pattern) are treated so; the first rule that fits a name counts."""

    __pydantic_config__ = STRICT
    match: str  # `visual.*`, `*.bias`, `text.token_embedding.weight`
    lr_scale: Positive = 1.0  # on top of the tower's and the layer's; model.lock keeps parameters as they are
    weight_decay: NonNegative | None = None  # in place of optim.weight_decay, also for vectors
    adapt: bool | None = None  # false: no trust ratio (lamb, lars)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What every optimizer takes."""

    __pydantic_config__ = STRICT
    lr: Positive
    weight_decay: NonNegative = 0.2  # of parameters with two dimensions or more
    warmup: Duration = field(default_factory=lambda: Duration(fraction=0.05))  # linear, from 0
    schedule: Schedule = field(default_factory=lambda: CosineSchedule("cosine"))
    lr_rule: Literal["none", "sqrt", "linear"] = "none"  # how lr, meant for base_batch pairs, grows with the batch
    base_batch: Count = 256
    image_lr_scale: Positive = 1.0
    text_lr_scale: Positive = 1.0
    image_layer_decay: PositiveShare = 1.0  # each layer's rate is that of the layer above, times this
    text_layer_decay: PositiveShare = 1.0
    vector_lr_scale: Positive = 1.0  # for vectors, scalars and the log scale, which lamb and lars give no trust ratio
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AdamW(Recipe):
    """Decoupled weight decay (Loshchilov and Hutter 2019)."""

    kind: Literal["adamw"]
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: Positive = 1e-6


@dataclass(frozen=True, kw_only=True)
class Lamb(Recipe):
    """Adam's direction, each layer's step as long as a share of its weights (You et al. 2020)."""

    kind: Literal["lamb"]
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Positive = 1e-6
    max_trust_ratio: NonNegative = 10.0  # 0: no bound


@dataclass(frozen=True, kw_only=True)
class Lars(Recipe):
    """Momentum, each layer's step as long as a share of its weights (You et al. 2017)."""

    kind: Literal["lars"]
    momentum: Beta = 0.9
    trust_coefficient: Positive = 0.001
    max_trust_ratio: NonNegative = 0.0


@dataclass(frozen=True, kw_only=True)
class Lion(Recipe):
    """The sign of an interpolated momentum (Chen et al. 2023): a tenth of AdamW's rate, ten times its decay."""

    kind: Literal["lion"]
    betas: tuple[Beta, Beta] = (0.9, 0.99)


@dataclass(frozen=True, kw_only=True)
class Sgd(Recipe):
    """Momentum; weight decay is part of the gradient here."""

    kind: Literal["sgd"]
    momentum: Beta = 0.9
    nesterov: bool = False


@dataclass(frozen=True, kw_only=True)
class Muon(Recipe):
    """Orthogonalised momentum for matrices (Jordan et al. 2024), scaled to AdamW's rates; AdamW for all else."""

    kind: Literal["muon"]
    momentum: Beta = 0.95
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: Positive = 1e-6


Optim = Annotated[AdamW | Lamb | Lars | Lion | Sgd | Muon, Field(discriminator="kind")]
