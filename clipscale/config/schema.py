"""Every key a configuration file may hold, with its default, its bounds and its meaning.

Plain frozen dataclasses; `load` fills and checks them. A table with a `kind` is a tagged union: the kind decides which
other keys exist. Whatever follows from these values (steps, rows per rank, ...) lives in `plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from clipscale.config.data import Data
from clipscale.config.optim import Optim
from clipscale.config.values import STRICT, Beta, Count, CountOrZero, Duration, NonNegative, Positive

Chunk = Count | Literal["whole"]


@dataclass(frozen=True)
class Run:
    __pydantic_config__ = STRICT
    seed: CountOrZero = 0


@dataclass(frozen=True)
class Train:
    """One step sees `global_batch` pairs, whatever the number of ranks; chunks only bound memory."""

    __pydantic_config__ = STRICT
    global_batch: Count
    duration: Duration
    image_chunk: Chunk = 128  # images per forward pass of the image tower, per rank
    text_chunk: Chunk = 512  # captions per forward pass of the text tower, per rank
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # of the towers, by autocast; weights, features, loss stay fp32
    clip_norm: NonNegative = 1.0  # bound of the global gradient norm; 0 switches clipping off
    keep_graph_bytes: CountOrZero | Literal["auto"] = "auto"  # per rank, for graphs kept instead of built twice
    max_skipped: Count = 10  # steps in a row left out because the loss or the gradient was not finite; one more: exit 4
    ema_decay: Beta = 0.0  # of an average of the weights, kept in fp32 beside them; 0: none
    write_keys: bool = False  # RUN/keys.jsonl: which samples each step trained on; for tests and audits, it is slow
    check_replay: bool = False  # compare the features of both passes, chunk by chunk
    save_every: Duration | None = None  # a checkpoint is always written at the end
    keep_checkpoints: Count = 3  # the newest ones; older ones are deleted
    eval_every: Duration | None = None  # the [[eval]] tables always run at the end


@dataclass(frozen=True)
class PlainEngine:
    """Whole weights and optimizer state on every rank: the reference that the others must equal."""

    __pydantic_config__ = STRICT
    kind: Literal["plain"]
    zero_stage: Literal[0] = 0


@dataclass(frozen=True)
class DeepSpeedEngine:
    """ZeRO: stage 1 shards the optimizer state over the ranks, 2 the gradients too, 3 the weights too."""

    __pydantic_config__ = STRICT
    kind: Literal["deepspeed"]
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 1
    # Stage 3: ranks that hold a second copy of the weights between them (ZeRO++), usually those of a node; 0: none.
    hpz_group: CountOrZero = 0
    offload_optimizer: bool = False  # optimizer state and fp32 weights live in host memory (stages 1 to 3)
    offload_parameters: bool = False  # sharded weights live in host memory (stage 3)


@dataclass(frozen=True)
class HsdpEngine:
    """FSDP2: everything sharded within groups of ranks, which talk to each other once a step."""

    __pydantic_config__ = STRICT
    kind: Literal["hsdp"]
    shard_group: Count  # ranks that share one copy of the weights, usually those of a node


Engine = Annotated[PlainEngine | DeepSpeedEngine | HsdpEngine, Field(discriminator="kind")]


@dataclass(frozen=True)
class SoftmaxLoss:
    """InfoNCE, as in CLIP (Radford et al. 2021)."""

    __pydantic_config__ = STRICT
    kind: Literal["softmax"]
    init_temperature: Positive = 0.07  # the logit scale starts at its inverse
    gather_dtype: Literal["fp32", "bf16"] = "fp32"  # what travels between ranks; bf16 rounds the features
    ring: bool = False  # pass features round instead of holding all of them
    budget_bytes: Count = 2**26  # for tiles of logits
    concept: str = ""  # samples equal in this field (`json:concept`) are not each other's negatives


@dataclass(frozen=True)
class SigmoidLoss:
    """Every pair on its own, as in SigLIP (Zhai et al. 2023), whose starting values these are."""

    __pydantic_config__ = STRICT
    kind: Literal["sigmoid"]
    init_temperature: Positive = 0.1
    init_bias: float = -10.0
    gather_dtype: Literal["fp32", "bf16"] = "fp32"
    ring: bool = False
    budget_bytes: Count = 2**26
    concept: str = ""


Loss = Annotated[SoftmaxLoss | SigmoidLoss, Field(discriminator="kind")]


@dataclass(frozen=True)
class Model:
    """An open_clip architecture by `name`; or `embed_dim`, `vision_cfg` and `text_cfg` as open_clip writes them.

    With both, the tables override single keys of the named architecture.
    """

    __pydantic_config__ = STRICT
    name: str = ""
    embed_dim: Count | None = None
    vision_cfg: dict[str, Any] = field(default_factory=dict)
    text_cfg: dict[str, Any] = field(default_factory=dict)
    quick_gelu: bool | None = None
    token_ids: str = ""  # JSON list of the token ids that occur; only these rows of the token table are trained
    pretrained: str = ""  # open_clip weights to start from: a file, or a folder as in RUN/model
    pretrained_towers: tuple[Literal["image", "text"], ...] = ("image", "text")  # which of both start from them
    lock: tuple[Literal["image", "text"], ...] = ()  # towers that stay as they are (LiT: the image tower)
    unlock_image_layers: CountOrZero = 0  # of a locked tower: so many of its last layers are trained all the same
    unlock_text_layers: CountOrZero = 0
    activation_checkpointing: bool = False
    compile: bool = False  # torch.compile on both towers
    freeze_batch_norm: bool = False  # keep BatchNorm layers at their statistics; without it they are refused


@dataclass(frozen=True)
class ZeroShotEval:
    """Names of `label` as classes; every image is given its most similar name."""

    __pydantic_config__ = STRICT
    kind: Literal["zeroshot"]
    name: str
    shards: str | tuple[str, ...]
    label: str = "json:label"
    templates: str = "none"  # none, simple, or a file with one template a line


@dataclass(frozen=True)
class RetrievalEval:
    """Images find their captions and captions their images."""

    __pydantic_config__ = STRICT
    kind: Literal["retrieval"]
    name: str
    shards: str | tuple[str, ...]
    caption: str = "txt"


Eval = Annotated[ZeroShotEval | RetrievalEval, Field(discriminator="kind")]


@dataclass(frozen=True)
class Config:
    """One whole experiment."""

    __pydantic_config__ = STRICT
    train: Train
    data: Data
    model: Model
    optim: Optim
    run: Run = Run()
    engine: Engine = field(default_factory=lambda: PlainEngine("plain"))
    loss: Loss = field(default_factory=lambda: SoftmaxLoss("softmax"))
    eval: tuple[Eval, ...] = ()
