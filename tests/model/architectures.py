"""Small architectures for tests, as `[model]` tables."""

from __future__ import annotations

from clipscale.config.schema import Model

VISION = {"image_size": 32, "patch_size": 8, "width": 32, "layers": 2, "head_width": 16}
TEXT = {"context_length": 24, "width": 32, "heads": 2, "layers": 2}


def small(**options: object) -> Model:
    """A ViT and a text tower of width 32, 32 px, 24 tokens."""
    return Model(**({"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT} | options))  # pyright: ignore[reportArgumentType]


def convolutions(trunk: str, **options: object) -> Model:
    """A timm trunk in place of the ViT."""
    return small(vision_cfg={"image_size": 32, "timm_model_name": trunk, "timm_pool": "avg"}, **options)


CAPTIONS = [
    "a red circle",
    "a small green square left of a large blue triangle",
    "",
    "two words",
    "an orange ring above a grey cross",
]
