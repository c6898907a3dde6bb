"""The losses by their plainest formulas: float64, the undivided batch, torch's autograd. And problems to compare on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipscale.dist.world import World
from clipscale.loss.contrastive import contrastive_loss
from clipscale.loss.gather import start_gather
from clipscale.loss.sigmoid import sigmoid_loss
from clipscale.loss.tiles import LossGradients


@dataclass(frozen=True)
class Problem:
    """A global batch, how it lies on the ranks, and how its loss is to be computed."""

    loss: str  # "softmax" or "sigmoid"
    rows: tuple[int, ...]
    scale: float = 14.3
    noise: float = 1.0  # of a text against its image: 0 makes them equal, a large one makes pairs unrelated
    d: int = 8
    dtype: torch.dtype = torch.float64
    num_concepts: int | None = None
    budget_bytes: int = 2**20  # all of these problems are dense in it
    ring: bool = False
    gather_dtype: torch.dtype | None = None
    rows_known: bool = True
    begun: bool = False  # the gather of texts, before the loss is called

    def features(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * sum(self.rows) + self.d)
        image, other = torch.randn(2, sum(self.rows), self.d, generator=generator, dtype=torch.float64)
        image = F.normalize(image, dim=1)
        text = F.normalize(image + self.noise * F.normalize(other, dim=1), dim=1)
        return image.to(self.dtype), text.to(self.dtype)

    @property
    def log_scale(self) -> Tensor:
        return torch.tensor(self.scale).log().to(torch.promote_types(self.dtype, torch.float32))

    @property
    def bias(self) -> Tensor:
        return torch.full_like(self.log_scale, -3.0)

    @property
    def concepts(self) -> Tensor | None:
        # Neighbours differ: equal concepts lie in different tiles and on different ranks.
        return None if self.num_concepts is None else torch.arange(sum(self.rows)) % self.num_concepts


def oracle(
    loss: str, image: Tensor, text: Tensor, log_scale: Tensor, bias: Tensor, concepts: Tensor | None = None
) -> LossGradients:
    """The loss of N pairs and all its gradients, in float64."""
    leaves = [x.detach().double().requires_grad_() for x in (image, text, log_scale, bias)]
    image, text, log_scale, bias = leaves
    truth = torch.arange(len(image))
    logits = log_scale.exp() * image @ text.T
    left_out = torch.zeros_like(logits, dtype=torch.bool)
    if concepts is not None:
        left_out = (concepts[:, None] == concepts[None, :]) & (truth[:, None] != truth[None, :])
    if loss == "softmax":
        logits = logits.masked_fill(left_out, -torch.inf)
        value = (F.cross_entropy(logits, truth) + F.cross_entropy(logits.T, truth)) / 2
    else:
        signs = 2 * torch.eye(len(image), dtype=torch.float64) - 1
        value = -F.logsigmoid(signs * (logits + bias)).masked_fill(left_out, 0).sum() / len(image)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    d_image, d_text, d_log_scale, d_bias = grads
    return LossGradients(value.detach(), d_image, d_text, d_log_scale, d_bias)


def expected(problem: Problem) -> LossGradients:
    image, text = (x.to(problem.gather_dtype or x.dtype) for x in problem.features())
    return oracle(problem.loss, image, text, problem.log_scale, problem.bias, problem.concepts)


def compute(world: World, problem: Problem) -> LossGradients:
    """Communicates. This rank's part of the answer, by the code under test."""
    parts: list[Any] = [x.split(problem.rows)[world.rank] for x in problem.features()]
    options: dict[str, Any] = {
        "rows": problem.rows if problem.rows_known else None,
        "budget_bytes": problem.budget_bytes,
        "gather_dtype": problem.gather_dtype,
        "ring": problem.ring,
        "concepts": None if problem.concepts is None else problem.concepts.split(problem.rows)[world.rank],
    }
    if problem.begun:
        parts[1] = start_gather(parts[1], world, rows=options["rows"], dtype=problem.gather_dtype)
    if problem.loss == "softmax":
        return contrastive_loss(*parts, problem.log_scale, world, **options)
    return sigmoid_loss(*parts, problem.log_scale, problem.bias, world, **options)


def compute_all(world: World, problems: Sequence[Problem]) -> list[LossGradients]:
    return [compute(world, problem) for problem in problems]


def join(parts: Sequence[LossGradients]) -> LossGradients:
    """The ranks' parts as one answer. What is global must be equal on all ranks, to the last bit."""
    for name in ("loss", "d_log_scale", "d_bias"):
        values = [getattr(part, name) for part in parts]
        assert values[0] is None or all(torch.equal(value, values[0]) for value in values), f"{name} differs: {values}"
    d_image, d_text = (torch.cat([getattr(part, name) for part in parts]) for name in ("d_image", "d_text"))
    return replace(parts[0], d_image=d_image, d_text=d_text)


def errors(found: LossGradients, wanted: LossGradients, scale: float) -> dict[str, float]:
    """Relative error of the value and of each gradient, in the Euclidean norm.

    Each is the difference of what true pairs hold and what all hold. Where these nearly cancel (few pairs, well told
    apart), rounding of the parts is all that is left: then errors are relative to 1% of what true pairs alone give.
    """
    n = len(wanted.d_image)
    of_pairs = {"loss": scale, "d_image": scale / n**0.5, "d_text": scale / n**0.5, "d_log_scale": scale, "d_bias": 1.0}
    found_parts, wanted_parts = vars(found), vars(wanted)
    return {
        name: ((found_parts[name].double() - y).norm() / max(y.norm().item(), 0.01 * of_pairs[name])).item()
        for name, y in wanted_parts.items()
        if y is not None
    }


def assert_close(found: LossGradients, wanted: LossGradients, tolerance: float, scale: float, what: object) -> None:
    wrong = {name: error for name, error in errors(found, wanted, scale).items() if not error <= tolerance}
    assert not wrong, f"relative errors {wrong} for {what}"


def assert_answers(problems: Sequence[Problem], parts: Sequence[Sequence[LossGradients]], tolerance: float) -> None:
    """Compares `parts`, every rank's answers to all problems, with the oracle."""
    for problem, answer in zip(problems, zip(*parts, strict=True), strict=True):
        assert all(part.d_image.dtype == torch.promote_types(problem.dtype, torch.float32) for part in answer)
        assert_close(join(answer), expected(problem), tolerance, problem.scale, problem)
