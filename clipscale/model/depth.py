"""How deep each parameter sits in its tower: for layer decay, and for towers of which only the top is trained."""

from __future__ import annotations

import re
from typing import Any

from timm.models import group_parameters
from torch import nn

from clipscale.dist.engine import Tower

# A block's position, as open_clip, timm and Hugging Face name it: `transformer.resblocks.3.`, `encoder.layer.3.`.
_BLOCK = re.compile(r"(?:^|\.)(?:resblocks|blocks|layers?|block|layer(?=\d))\.?(\d+)\.")
# What comes before the first block. All else that is in no block comes after the last.
_BOTTOM = {"conv1", "conv2", "conv3", "bn1", "bn2", "bn3", "class_embedding", "positional_embedding", "ln_pre"}
_BOTTOM |= {"token_embedding", "cls_emb", "embeddings", "embed_tokens", "shared", "patch_embed"}


def layers_above(tower: nn.Module) -> dict[str, int]:
    """For each parameter of one tower, the number of layers above its own; 0 is the projection.

    A timm trunk knows its own layers; it says so through its `group_matcher`. Without one it counts as one layer.
    """
    trunk = getattr(tower, "trunk", None)
    if trunk is not None:
        depth = {f"trunk.{name}": layer for name, layer in _timm_layers(trunk).items()}
        top = max(depth.values(), default=-1) + 1
        depth |= {name: top for name, _ in tower.named_parameters() if name not in depth}
    else:
        depth = {name: _depth(name) for name, _ in tower.named_parameters()}
        top = max((layer for layer in depth.values() if layer is not None), default=0) + 1
        depth = {name: top if layer is None else layer for name, layer in depth.items()}
    return {name: max(depth.values()) - layer for name, layer in depth.items()}


def _timm_layers(trunk: Any) -> dict[str, int]:
    if not hasattr(trunk, "group_matcher"):
        return {name: 0 for name, _ in trunk.named_parameters()}
    known: Any = group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True)
    used = sorted(set(known.values()))
    return {name: used.index(layer) for name, layer in known.items()}


def _depth(name: str) -> int | None:
    """0 below the blocks, 1 for the first; None above them."""
    if match := _BLOCK.search(name):
        counts_from_one = match[0].lstrip(".").startswith(f"layer{match[1]}")  # a ResNet's layer1 to layer4
        return int(match[1]) + (not counts_from_one)
    return 0 if _BOTTOM & set(name.split(".")) else None


def depths(visual: nn.Module, text: nn.Module) -> dict[str, tuple[Tower, int]]:
    """By name in the whole model: the tower, and the number of layers above. The log scale is in neither tower."""
    found: dict[str, tuple[Tower, int]] = {}
    found |= {f"visual.{name}": ("image", above) for name, above in layers_above(visual).items()}
    found |= {f"text.{name}": ("text", above) for name, above in layers_above(text).items()}
    return found


def lock(tower: nn.Module, *, unlocked_layers: int) -> int:
    """Keeps the tower as it is, but for its last `unlocked_layers`; 1 is the projection alone. -> its layers in all."""
    above = layers_above(tower)
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(above[name] < unlocked_layers)
    return len(set(above.values()))
