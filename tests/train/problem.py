"""One small batch, its gradients by plain autograd, and the same gradients as an engine applies them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import open_clip
import torch
import torch.nn.functional as F
from open_clip.model import CustomTextCLIP
from torch import Tensor, nn

from clipscale import step
from clipscale.config.optim import AdamW
from clipscale.config.schema import Model, SigmoidLoss, SoftmaxLoss
from clipscale.dist import deepspeed_engine, hsdp_engine
from clipscale.dist.engine import Engine, PlainEngine, set_rates
from clipscale.dist.world import World
from clipscale.loss.cache import RandomState
from clipscale.model.towers import Towers, build_towers
from clipscale.optim.groups import parameter_groups, treatments
from clipscale.step import StepShape, train_step
from clipscale.train import build
from tests.helpers.engines import make_engine

NUM_PAIRS = 16
_LR = 100.0  # large: what SGD subtracts is then the gradient to full precision
_VISION = {"image_size": 16, "patch_size": 4, "width": 16, "layers": 2, "head_width": 8}
_TEXT = {"context_length": 12, "vocab_size": 50, "width": 16, "heads": 2, "layers": 2}


@dataclass(frozen=True)
class Case:
    """How the gradient of the batch is to be computed. `bug` names a fault to plant, see `planted`."""

    engine: str = "plain"  # or ZeRO-0 to ZeRO-3, hpZ-2, hsdp-1 to hsdp-4 (ranks per group)
    image_chunk: int = NUM_PAIRS
    text_chunk: int = NUM_PAIRS
    keep_image_graphs: int = 0
    keep_text_graphs: int = 0
    loss: str = "softmax"
    patch_dropout: float = 0.0
    activation_checkpointing: bool = False
    clip_norm: float = 0.0
    bug: str = ""


@dataclass(frozen=True)
class Answer:
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]


def batch() -> tuple[Tensor, Tensor]:
    """uint8 images [16, 3, 16, 16] and token ids [16, 12] of 2 to 12 tokens, end of text (49) last."""
    rng = torch.Generator().manual_seed(5)
    images = torch.randint(256, (NUM_PAIRS, 3, 16, 16), dtype=torch.uint8, generator=rng)
    tokens = torch.randint(1, 49, (NUM_PAIRS, 12), generator=rng)
    for row, length in enumerate(torch.randint(2, 13, (NUM_PAIRS,), generator=rng).tolist()):
        tokens[row, length - 1] = 49
        tokens[row, length:] = 0
    return images, tokens


def _random_seed(rank: int) -> int:
    return 100 + rank


def make_towers(case: Case) -> Towers:
    model = Model(
        embed_dim=8,
        vision_cfg=_VISION | {"patch_dropout": case.patch_dropout},
        text_cfg=_TEXT,
        activation_checkpointing=case.activation_checkpointing,
    )
    torch.manual_seed(3)
    towers, _ = build_towers(model, _loss_settings(case))
    with torch.no_grad():
        for parameter in towers.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # biases start at zero, which would hide much
    return towers


def _loss_settings(case: Case) -> SoftmaxLoss | SigmoidLoss:
    if case.loss == "softmax":
        return SoftmaxLoss("softmax", init_temperature=0.2)
    return SigmoidLoss("sigmoid", init_temperature=0.2, init_bias=-1.0)


# ---- the oracle -------------------------------------------------------------------------------------------------


def autograd(case: Case, world_size: int) -> Answer:
    """The undivided batch in one process and one graph, in float64, by open_clip's own model.

    Chunks matter for random numbers only: with dropout, a rank's images pass in the case's chunks.
    """
    weights = {name: weight.double() for name, weight in make_towers(case).state_dict().items()}
    scalars = [weights.pop(f"logits.{name}") for name in ("log_scale", "bias") if f"logits.{name}" in weights]
    clip = CustomTextCLIP(8, _VISION | {"patch_dropout": case.patch_dropout}, _TEXT).double()
    clip.load_state_dict(weights | {"logit_scale": scalars[0].squeeze(0)})
    images, tokens = batch()
    mean, std = (
        torch.tensor(values, dtype=torch.float64).view(3, 1, 1)
        for values in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    )
    parts = []
    for rank, rows in enumerate((images.double() / 255 - mean).div(std).chunk(world_size)):
        torch.manual_seed(_random_seed(rank))
        parts += [clip.encode_image(chunk, normalize=True) for chunk in rows.split(case.image_chunk)]
    bias = scalars[1].requires_grad_() if len(scalars) > 1 else None
    logits = clip.logit_scale.exp() * torch.cat(parts) @ clip.encode_text(tokens, normalize=True).T
    truth = torch.arange(NUM_PAIRS)
    if bias is None:
        loss = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth)) / 2
    else:
        loss = -F.logsigmoid((2 * torch.eye(NUM_PAIRS) - 1) * (logits + bias)).sum() / NUM_PAIRS
    loss.backward()
    named = {name: parameter.grad for name, parameter in clip.named_parameters()}
    gradients = {name: gradient for name, gradient in named.items() if name.startswith(("visual.", "text."))}
    gradients["logits.log_scale"] = named["logit_scale"].view(1)
    if bias is not None:
        gradients["logits.bias"] = bias.grad
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    if case.clip_norm:
        gradients = {name: gradient * min(1.0, case.clip_norm / norm) for name, gradient in gradients.items()}
    return Answer(loss.item(), norm, gradients)


# ---- the code under test ----------------------------------------------------------------------------------------


def measure(world: World, case: Case) -> Answer:
    """Communicates. What the engine subtracts from the weights in the second of two steps of SGD.

    The first step has a learning rate of zero: whatever it leaves behind, the second must not see.
    """
    with planted(case.bug):
        towers = make_towers(case)
        engine = _engine(case, towers, world)
        # Under most engines these are the weights themselves, not copies.
        before = {name: weight.clone() for name, weight in engine.weights().items()}
        images, tokens = (rows.chunk(world.size)[world.rank] for rows in batch())
        shape = StepShape(
            case.image_chunk,
            case.text_chunk,
            keep_image_graphs=case.keep_image_graphs,
            keep_text_graphs=case.keep_text_graphs,
        )
        loss = build._loss(_loss_settings(case))
        for lr_factor in (0.0, 1.0):
            torch.manual_seed(_random_seed(world.rank))
            result = train_step(engine, images, tokens, world, shape=shape, loss=loss, lr_factor=lr_factor)
        after = engine.weights()
    return Answer(result.loss, result.grad_norm, {name: (before[name].double() - after[name]) / _LR for name in before})


def sgd(model: nn.Module, lr: float) -> torch.optim.SGD:
    """Without momentum and decay: what it subtracts is lr times the gradient."""
    treated = treatments(model, AdamW(kind="adamw", lr=lr, weight_decay=0.0), {})
    return torch.optim.SGD(parameter_groups(model, treated, lr), lr=lr)


def _engine(case: Case, towers: Towers, world: World) -> Engine:
    rows = NUM_PAIRS // world.size
    options = {"rank_batch": rows, "clip_norm": case.clip_norm}
    return make_engine(world, case.engine, towers, lambda model: sgd(model, _LR), **options)[0]


def measure_all(world: World, cases: Sequence[Case]) -> list[Answer]:
    return [measure(world, case) for case in cases]


# ---- comparing --------------------------------------------------------------------------------------------------


def assert_equal(found: Answer, wanted: Answer, tolerance: float = 2e-5) -> None:
    """Relative to each parameter's own gradient, in the Euclidean norm."""
    assert found.gradients.keys() == wanted.gradients.keys()
    wrong = {}
    for name, gradient in wanted.gradients.items():
        error = ((found.gradients[name] - gradient).norm() / gradient.norm()).item()
        if not error <= tolerance:
            wrong[name] = error
    for name in ("loss", "grad_norm"):
        error = abs(getattr(found, name) / getattr(wanted, name) - 1)
        if not error <= tolerance:
            wrong[name] = error
    worst = dict(sorted(wrong.items(), key=lambda item: -item[1])[:4])
    assert not wrong, f"{len(wrong)} relative errors, the worst: {worst}"


# ---- faults to plant --------------------------------------------------------------------------------------------


def _forget_the_world(engine: Any, embedded: Any, gradient: Tensor, **options: Any) -> None:
    _replay(engine, embedded, gradient / torch.distributed.get_world_size(), **options)


def _always_a_boundary(self: Any, surrogate: Tensor, *, last: bool) -> None:  # noqa: ARG001
    self._engine.set_gradient_accumulation_boundary(True)
    self._engine.backward(surrogate, scale_wrt_gas=False)


def _never_a_boundary(self: Any, surrogate: Tensor, *, last: bool) -> None:  # noqa: ARG001
    self._engine.backward(surrogate, scale_wrt_gas=False)


def _keep_old_gradients(self: Any, lr_factor: float) -> float:
    set_rates(self._engine.optimizer, lr_factor)
    self._engine.step()
    return float(self._engine.get_global_grad_norm())


def _forget_to_clip_nothing(*arguments: Any) -> dict[str, Any]:
    settings = _settings(*arguments)
    del settings["gradient_clipping"]
    return settings


def _no_averaging(self: Any, surrogate: Tensor, *, last: bool) -> None:  # noqa: ARG001
    surrogate.backward()


def _leave_the_order_of_chunks(*arguments: Any, **options: Any) -> Any:
    embedded = _embed(*arguments, **options)
    rows = torch.cat([chunk.rows for chunk in embedded.chunks])
    return replace(embedded, features=embedded.features[rows])


def _groups_apart(self: Any) -> None:
    pass


_replay, _settings, _embed = step.replay, deepspeed_engine._settings, step.embed
_ENGINE = deepspeed_engine.DeepSpeedEngine
_BUGS: dict[str, tuple[Any, str, Any]] = {
    "no world factor": (step, "replay", _forget_the_world),
    "scale gradient once per chunk": (step, "_d_scalars", lambda result: 2 * result.d_log_scale.view(1)),
    "random state not restored": (RandomState, "restore", lambda _self, _device: None),
    "every chunk a boundary": (_ENGINE, "backward", _always_a_boundary),
    "boundary never set": (_ENGINE, "backward", _never_a_boundary),
    "old gradients stay in stage 3": (_ENGINE, "step", _keep_old_gradients),
    "DeepSpeed's own clipping": (deepspeed_engine, "_settings", _forget_to_clip_nothing),
    "groups never meet": (hsdp_engine.HsdpEngine, "_average_over_groups", _groups_apart),
    "no averaging over ranks": (PlainEngine, "backward", _no_averaging),
    "features in the order of chunks": (step, "embed", _leave_the_order_of_chunks),
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """The block runs with one fault in the code under test; with none for an empty name."""
    if not bug:
        yield
        return
    owner, name, fault = _BUGS[bug]
    with patch.object(owner, name, fault):
        yield
