"""Zero-shot classification: the class whose name fits an image best, by cosine (Radford et al. 2021, section 3.1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from clipscale.evaluate.ranks import Metric, Result, first_k, rank_truth


class ZeroShotResult(Result):
    """Metrics `top{k}` and `mean_class_recall`; sizes `n_samples`, `n_classes`, `n_classes_seen` (with an image)."""


def zeroshot(
    image_features: Float[Tensor, "n d"],
    labels: Int[Tensor, "n"],
    class_features: Float[Tensor, "c d"],
    ks: tuple[int, ...] = (1, 5, 10),
    *,
    chunk: int | None = None,
) -> ZeroShotResult:
    """Top-k accuracy for each k up to the number of classes, and the mean over the classes seen of top-1 recall.

    `labels` index `class_features`. Ties count by expectation (see `ranks`): equal features for all classes score k/c.
    `chunk` images at a time bound the memory and change nothing else.

    Raises DivergedError for features that are not finite, DataError for an empty set or a label that is no class.
    """
    classes = torch.arange(len(class_features))
    ranks = rank_truth(image_features, class_features, labels, classes, what=("image", "class"), chunk=chunk)
    blind = ranks.blind()
    labels = labels.cpu()
    seen = len(labels.unique())
    top = [
        Metric(f"top{k}", ranks.hits(k).mean().item(), blind.hits(k).mean().item()) for k in first_k(ks, len(classes))
    ]
    recall = Metric("mean_class_recall", _class_mean(ranks.hits(1), labels), _class_mean(blind.hits(1), labels))
    return ZeroShotResult((*top, recall), {"n_samples": len(labels), "n_classes": len(classes), "n_classes_seen": seen})


def best_classes(
    image_features: Float[Tensor, "n d"], class_features: Float[Tensor, "c d"], k: int = 5
) -> tuple[Float[Tensor, "n k"], Int64[Tensor, "n k"]]:
    """Cosines and indices of the k best classes of each image, best first, for showing a few images; k <= c."""
    scores = F.normalize(image_features.double(), dim=1) @ F.normalize(class_features.double(), dim=1).T
    values, indices = scores.topk(k, dim=1)
    return values, indices


def _class_mean(hits: Float64[Tensor, "n"], labels: Int[Tensor, "n"]) -> float:
    """The mean over classes of the mean over a class's images: a class of one image weighs as much as one of many."""
    _, index, count = labels.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(count), dtype=torch.float64).index_add(0, index, hits)
    return (sums / count).mean().item()
