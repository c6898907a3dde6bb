"""Retrieval both ways: the captions of an image among all captions, the images of a caption among all images."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from clipscale.evaluate.ranks import Metric, Ranks, Result, first_k, rank_truth


class RetrievalResult(Result):
    """Metrics `image_to_text_` and `text_to_image_` + `r{k}` or `median_rank`; sizes `n_images`, `n_texts`."""


def retrieval(
    image_features: Float[Tensor, "i d"],
    text_features: Float[Tensor, "t d"],
    image_groups: Int[Tensor, "i"],
    text_groups: Int[Tensor, "t"],
    ks: tuple[int, ...] = (1, 5, 10),
    *,
    chunk: int | None = None,
) -> RetrievalResult:
    """Recall at each k up to the number of candidates, and the median rank of the first true one, in both directions.

    An image and a text belong together when their groups are equal: an image may have several captions, a caption
    several images, and any true one counts. The candidates are always the whole other set. Ties count by expectation
    (see `ranks`); chance is exact for each query's own number of true candidates. `chunk` queries at a time bound the
    memory and change nothing else.

    Raises DivergedError for features that are not finite, DataError for an empty set or an item without a partner.
    """
    images, texts = (image_features, image_groups), (text_features, text_groups)
    to_text = _rank(images, texts, ("image", "text"), chunk)
    to_image = _rank(texts, images, ("text", "image"), chunk)
    metrics = (*_metrics("image_to_text", to_text, ks), *_metrics("text_to_image", to_image, ks))
    return RetrievalResult(metrics, {"n_images": len(image_features), "n_texts": len(text_features)})


def _rank(
    queries: tuple[Tensor, Tensor], candidates: tuple[Tensor, Tensor], what: tuple[str, str], chunk: int | None
) -> Ranks:
    return rank_truth(queries[0], candidates[0], queries[1], candidates[1], what=what, chunk=chunk)


def _metrics(direction: str, ranks: Ranks, ks: tuple[int, ...]) -> list[Metric]:
    blind = ranks.blind()
    recalls = [
        Metric(f"{direction}_r{k}", ranks.hits(k).mean().item(), blind.hits(k).mean().item())
        for k in first_k(ks, ranks.num_candidates)
    ]
    middle, chance = (float(np.median(of.first().numpy())) for of in (ranks, blind))
    return [*recalls, Metric(f"{direction}_median_rank", middle, chance, unit="rank")]
