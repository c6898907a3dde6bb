"""The two towers and the log temperature behind one forward. The only file that knows open_clip.

An architecture is an open_clip model configuration: a table with `embed_dim`, `vision_cfg` and `text_cfg`. It comes
from open_clip's list by name, from the experiment's own tables, or from both, the tables overriding single keys.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import hashlib
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import open_clip
import safetensors
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from open_clip.model import CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP
from open_clip.tokenizer import HFTokenizer, SimpleTokenizer
from open_clip.transformer import TextTransformer
from timm.layers.norm_act import freeze_batch_norm_2d
from torch import Tensor, nn

from clipscale.config.schema import Loss, Model, SigmoidLoss, SoftmaxLoss
from clipscale.dist.engine import Tower
from clipscale.errors import ConfigError, DataError, listed
from clipscale.model import depth

# ---- architecture -----------------------------------------------------------------------------------------------


def resolve_architecture(model: Model) -> dict[str, Any]:
    """The complete open_clip configuration that `[model]` describes. Raises `ConfigError` with every fault found."""
    architecture: dict[str, Any] = {}
    faults: list[str] = []
    has_tables = bool(model.vision_cfg or model.text_cfg)
    if model.name:
        architecture = _named(model.name) or {}
        # With tables that describe a whole model, the name may be one of the user's own.
        if not architecture and not (has_tables and model.embed_dim is not None):
            faults.append(f"model.name: open_clip knows no {model.name!r}{_near(model.name, open_clip.list_models())}")
    elif not has_tables:
        faults.append("[model]: wanted a `name` of open_clip's list, or `embed_dim`, `vision_cfg` and `text_cfg`")
    if "multimodal_cfg" in architecture:
        faults.append(f"model.name: {model.name!r} has a caption decoder (CoCa); wanted two towers")
    for table, given, known in (
        ("vision_cfg", model.vision_cfg, CLIPVisionCfg),
        ("text_cfg", model.text_cfg, CLIPTextCfg),
    ):
        names = [field.name for field in dataclasses.fields(known)]
        # open_clip adds the first two to its own HF text models without declaring them; the third is ours.
        names += ["hf_proj_type", "hf_pooler_type"] if known is CLIPTextCfg else ["timm_kwargs"]
        for key in given:
            if key not in names:
                faults.append(f"model.{table}.{key}: unknown key{_near(key, names)}")
        architecture[table] = {**architecture.get(table, {}), **given}
    if model.embed_dim is not None:
        architecture["embed_dim"] = model.embed_dim
    if model.quick_gelu is not None:
        architecture["quick_gelu"] = model.quick_gelu
    if not faults and "embed_dim" not in architecture:
        faults.append("model.embed_dim is missing: the width of the shared feature space")
    trunk = architecture.get("vision_cfg", {}).get("timm_model_name")
    if trunk and not timm.is_model(trunk):
        faults.append(f"model.vision_cfg.timm_model_name: timm knows no {trunk!r}{_near(trunk, timm.list_models())}")
    if faults:
        raise ConfigError(listed("no such model", faults))
    return architecture


def _named(name: str) -> dict[str, Any] | None:
    config = open_clip.get_model_config(name)
    return copy.deepcopy(config) if config else None


def _near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def image_size(architecture: Mapping[str, Any]) -> int:
    """The side in pixels of the square images that the image tower takes."""
    size = architecture["vision_cfg"].get("image_size", 224)
    if not isinstance(size, int):
        if len(set(size)) != 1:
            raise ConfigError(f"model.vision_cfg.image_size: found {size}, wanted a square; give one integer")
        size = size[0]
    return size


# ---- towers -----------------------------------------------------------------------------------------------------


class LogitScaling(nn.Module):
    """The logarithm of the inverse temperature and, for the sigmoid loss, the bias; of shape [1], not [].

    DeepSpeed cannot hold 0-dim parameters. A module of its own, so that ZeRO-3 gathers both by the usual hooks; its
    forward returns a fresh tensor, which outlives the gathering.
    """

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor([math.log(1 / loss.init_temperature)]))
        self.bias = nn.Parameter(torch.tensor([loss.init_bias])) if isinstance(loss, SigmoidLoss) else None

    def forward(self) -> Tensor:
        """-> [1] or [2]"""
        return torch.cat([self.log_scale] if self.bias is None else [self.log_scale, self.bias])


class Towers(nn.Module):
    """Both towers of a CLIP model; `forward` runs one of them.

    Names follow open_clip's `CustomTextCLIP`: `visual.*` and `text.*`. Features leave in fp32 with unit length.
    """

    visual: Any  # open_clip's towers come in several classes
    text: Any
    mean: Tensor
    std: Tensor

    def __init__(
        self, architecture: Mapping[str, Any], model: Model, loss: Loss, *, half: torch.dtype | None = None
    ) -> None:
        super().__init__()
        clip = _build(architecture)
        self.visual, self.text = clip.visual, clip.text
        self.logits = LogitScaling(loss)
        self.half_dtype = half
        # Shape [3, 1, 1], so that they broadcast over [n, 3, H, W].
        self.register_buffer("mean", torch.tensor(open_clip.OPENAI_DATASET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(open_clip.OPENAI_DATASET_STD).view(3, 1, 1), persistent=False)
        if model.activation_checkpointing:
            self.visual.set_grad_checkpointing(True)
            self.text.set_grad_checkpointing(True)
        if model.freeze_batch_norm:
            self.visual = freeze_batch_norm_2d(self.visual)
        _refuse_batch_norm(self)
        self._lock(model)
        if model.compile:
            self.visual.compile()
            self.text.compile(dynamic=True)  # captions are trimmed to many lengths

    def _lock(self, model: Model) -> None:
        unlocked: dict[Tower, int] = {"image": model.unlock_image_layers, "text": model.unlock_text_layers}
        if set(model.lock) == {"image", "text"} and not any(unlocked.values()):
            raise ConfigError(
                "model.lock: both towers are locked, so there is nothing to train; unlock one, or its top"
            )
        for tower, wanted in unlocked.items():
            if tower not in model.lock:
                if wanted:
                    raise ConfigError(
                        f"model.unlock_{tower}_layers: the {tower} tower is not in model.lock, so all of it is trained"
                    )
                continue
            layers = depth.lock(self._tower(tower), unlocked_layers=wanted)
            if wanted >= layers:
                raise ConfigError(
                    f"model.unlock_{tower}_layers: found {wanted}, wanted fewer than the {tower} tower's {layers} "
                    "layers; to train all of it, take it out of model.lock"
                )

    def _tower(self, tower: Tower) -> Any:
        return self.visual if tower == "image" else self.text

    def depths(self) -> dict[str, tuple[Tower, int]]:
        """By parameter: the tower, and the number of layers above."""
        return depth.depths(self.visual, self.text)

    def is_trained(self, tower: Tower) -> bool:
        return any(parameter.requires_grad for parameter in self._tower(tower).parameters())

    def forward(self, tower: Tower, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 images [n, 3, H, W] or token ids [n, L] -> (features [n, d], log scale and maybe bias [1 or 2])."""
        with torch.autocast(inputs.device.type, self.half_dtype, enabled=self.half_dtype is not None):
            features = self._see(inputs) if tower == "image" else self._read(inputs)
        return F.normalize(features.float(), dim=-1), self.logits()

    def _see(self, images: Tensor) -> Tensor:
        pixels = (images.float() / 255 - self.mean) / self.std
        # Convolutions take the layout of their input; this one is up to twice as fast, on CPU and on tensor cores.
        return self.visual(pixels.contiguous(memory_format=torch.channels_last))

    def _read(self, tokens: Tensor) -> Tensor:
        if not self.trims_text or tokens.shape[1] == self.text.context_length:
            return self.text(tokens)
        # open_clip slices the positions to the length given, but not the causal mask.
        mask, length = self.text.attn_mask, tokens.shape[1]
        self.text.attn_mask = mask[:length, :length]
        try:
            return self.text(tokens)
        finally:
            self.text.attn_mask = mask

    @property
    def trims_text(self) -> bool:
        """Whether what follows the pooled token cannot change its feature, so that it may be cut off."""
        text = self.text
        return (
            isinstance(text, TextTransformer)
            and text.attn_mask is not None
            and text.cls_emb is None
            and text.pool_type in ("argmax", "eos")
        )

    def text_lengths(self, tokens: Tensor) -> Tensor:
        """Ids [n, L] -> the number of leading ids, [n], that each feature depends on."""
        if not self.trims_text:
            return torch.full((len(tokens),), tokens.shape[1])
        pooled = tokens if self.text.pool_type == "argmax" else (tokens == self.text.eos_id).int()
        return pooled.argmax(dim=1).cpu() + 1


def _build(architecture: Mapping[str, Any]) -> CustomTextCLIP:
    known = copy.deepcopy({key: architecture[key] for key in ("embed_dim", "vision_cfg", "text_cfg")})
    kwargs = known["vision_cfg"].pop("timm_kwargs", None)
    try:
        if kwargs:
            known["vision_cfg"]["timm_model_name"] = _timm_variant(known["vision_cfg"]["timm_model_name"], kwargs)
        return CustomTextCLIP(**copy.deepcopy(known), quick_gelu=architecture.get("quick_gelu", False))
    except Exception as error:  # whatever a constructor dislikes is a fault of the request
        raise ConfigError(f"the model cannot be built from {json.dumps(known)}: {error}") from error


def _timm_variant(name: str, kwargs: Mapping[str, Any]) -> str:
    """Registers a timm model with other constructor arguments, which open_clip has no way to pass; -> its name."""

    def variant(pretrained: bool = False, **given: Any) -> nn.Module:
        return timm.create_model(name, pretrained=pretrained, **kwargs, **given)

    digest = hashlib.sha256(json.dumps(kwargs, sort_keys=True).encode()).hexdigest()[:8]
    variant.__name__, variant.__module__ = f"{name}_{digest}", __name__
    if not timm.is_model(variant.__name__):
        timm.models.register_model(variant)
    return variant.__name__


def _refuse_batch_norm(towers: nn.Module) -> None:
    """Batch statistics of a chunk are not those of the batch, and two passes would update them twice."""
    found = [name for name, module in towers.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if found:
        raise ConfigError(
            f"the model has {len(found)} BatchNorm layers (the first: {found[0]}). Their statistics would depend on "
            "the chunk, not on the batch. Choose a network with LayerNorm or GroupNorm, or set model.freeze_batch_norm."
        )


def build_towers(model: Model, loss: Loss, *, half: torch.dtype | None = None) -> tuple[Towers, dict[str, Any]]:
    """The towers and their architecture, with the token table cut to `model.token_ids` where given.

    `half` is what the towers compute in where autocast sees fit; the weights stay fp32.
    """
    architecture = resolve_architecture(model)
    cut = copy.deepcopy(architecture)
    if model.token_ids:
        cut["text_cfg"]["vocab_size"] = len(read_token_ids(Path(model.token_ids)))
    towers = Towers(cut, model, loss, half=half)
    if model.pretrained:
        _load_pretrained(towers, model)
    return towers, architecture


def _load_pretrained(towers: Towers, model: Model) -> None:
    path = Path(model.pretrained)
    if path.is_dir():
        path = path / "open_clip_model.safetensors"
    if not path.is_file():
        raise ConfigError(f"model.pretrained: no file at {path}")
    try:
        weights: Any = open_clip.factory.load_state_dict(str(path), weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, safetensors.SafetensorError) as error:
        raise ConfigError(f"model.pretrained: {path} cannot be read as weights: {error}") from error
    ours = _from_open_clip(weights)
    table = "text.token_embedding.weight"
    if model.token_ids and table in ours:
        ours[table] = ours[table][read_token_ids(Path(model.token_ids))]
    own_bias = towers.logits.bias
    if own_bias is not None:
        ours.setdefault("logits.bias", own_bias.detach())  # a CLIP model has none to give
    else:
        ours.pop("logits.bias", None)
    try:
        _resize_positions(ours, towers)
        if set(model.pretrained_towers) != {"image", "text"}:  # then the temperature starts anew, too
            taken = tuple({"image": "visual.", "text": "text."}[tower] for tower in model.pretrained_towers)
            ours = towers.state_dict() | {name: tensor for name, tensor in ours.items() if name.startswith(taken)}
        towers.load_state_dict(ours)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model.pretrained: {path} holds another model: {error}") from error


def _resize_positions(weights: dict[str, Tensor], towers: Towers) -> None:
    """For another image size or context length: positions are interpolated in place, as open_clip does it."""
    open_clip.model.resize_pos_embed(weights, towers)
    if "text.positional_embedding" in weights and hasattr(towers.text, "positional_embedding"):
        open_clip.model.resize_text_pos_embed(weights, towers)


# ---- tokens -----------------------------------------------------------------------------------------------------


def read_token_ids(path: Path) -> list[int]:
    """The sorted ids of the rows of the token table that are trained. The end-of-text id must be among them."""
    if not path.is_file():
        raise ConfigError(
            f"model.token_ids: no file at {path}; build the data first, or drop the key for the full table"
        )
    try:
        ids = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"model.token_ids: {path} is not JSON: {error}") from error
    end = open_clip.tokenizer._tokenizer.eot_token_id
    if not isinstance(ids, list) or not all(isinstance(item, int) for item in ids):
        raise ConfigError(f"model.token_ids: {path} must hold a list of integers")
    ids = sorted(set(ids))
    if not ids or ids[0] != 0 or ids[-1] != end:
        raise ConfigError(f"model.token_ids: {path} must run from 0 (padding) to {end} (end of text)")
    return ids


def clip_token_ids(caption: str) -> list[int]:
    """The ids of CLIP's own byte-pair encoding, without start and end."""
    return open_clip.tokenizer._tokenizer.encode(caption)


class Tokenize:
    """Captions -> ids [n, L], padded with zeros, cut so that the end-of-text id stays the last. Picklable."""

    def __init__(self, model: Model, architecture: Mapping[str, Any]) -> None:
        text = architecture["text_cfg"]
        self.context_length: int = text.get("context_length", 77)
        self._tokenizer = _tokenizer(text, self.context_length)
        self._position: dict[int, int] = {}
        if model.token_ids:
            if not isinstance(self._tokenizer, SimpleTokenizer):
                raise ConfigError("model.token_ids works with CLIP's own tokenizer only; drop the key")
            self._position = {token: row for row, token in enumerate(read_token_ids(Path(model.token_ids)))}
        self._ids_of = lru_cache(maxsize=65536)(self._ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle_tokenize, (self.context_length, self._tokenizer, self._position)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Raises `DataError` for a caption that needs a token outside `model.token_ids`."""
        ids = torch.zeros(len(captions), self.context_length, dtype=torch.long)
        for row, caption in enumerate(captions):
            found = self._ids_of(caption)
            ids[row, : len(found)] = torch.tensor(found)
        return ids

    def _ids(self, caption: str) -> list[int]:
        ids = self._tokenizer([caption], self.context_length)[0].tolist()
        if not self._position:
            return ids
        while ids and ids[-1] == 0:
            ids.pop()
        try:
            return [self._position[token] for token in ids]
        except KeyError as error:
            raise DataError(
                f"caption {caption!r} needs token {error.args[0]}, which model.token_ids leaves out. Rebuild that list "
                "with this caption among the data, or train with the full token table."
            ) from error


def _unpickle_tokenize(context_length: int, tokenizer: Any, position: dict[int, int]) -> Tokenize:
    made = Tokenize.__new__(Tokenize)
    made.context_length, made._tokenizer, made._position = context_length, tokenizer, position
    made._ids_of = lru_cache(maxsize=65536)(made._ids)
    return made


def _tokenizer(text_cfg: Mapping[str, Any], context_length: int) -> Any:
    name = text_cfg.get("hf_tokenizer_name")
    if not name:
        return SimpleTokenizer(context_length=context_length)
    try:
        return HFTokenizer(name, context_length=context_length, **(text_cfg.get("tokenizer_kwargs") or {}))
    except Exception as error:  # transformers missing, no network, no such name
        raise ConfigError(
            f"the tokenizer {name!r} cannot be loaded: {error}. Install `transformers`, and point "
            "model.text_cfg.hf_tokenizer_name at a local folder where the hub is out of reach."
        ) from error


# ---- open_clip's names ------------------------------------------------------------------------------------------


_SCALARS = {"logits.log_scale": "logit_scale", "logits.bias": "logit_bias"}


def _from_open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """open_clip's names -> ours, without what data parallelism and torch.compile put before them."""
    ours: dict[str, Tensor] = {}
    scalars = {theirs: name for name, theirs in _SCALARS.items()}
    for name, tensor in weights.items():
        while name.startswith(("module.", "_orig_mod.")):
            name = name.partition(".")[2]
        if name in scalars:
            ours[scalars[name]] = tensor.reshape(1)
        else:
            ours[name if name.startswith(("visual.", "text.")) else f"text.{name}"] = tensor
    return ours


def to_open_clip(
    weights: Mapping[str, Tensor], model: Model, architecture: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Our whole weights -> the state dict and the `open_clip_config.json` of an ordinary open_clip model.

    Rows of the token table that were never trained come back as zeros.
    """
    empty = [name for name, tensor in weights.items() if tensor.numel() == 0]
    assert not empty, f"these weights were not gathered: {empty}"
    exported: dict[str, Tensor] = {}
    own_text = architecture.get("custom_text", False) or "hf_model_name" in architecture["text_cfg"]
    for name, tensor in weights.items():
        if name in _SCALARS:
            exported[_SCALARS[name]] = tensor.reshape(())
            continue
        if name == "text.token_embedding.weight" and model.token_ids:
            ids = read_token_ids(Path(model.token_ids))
            full = tensor.new_zeros(architecture["text_cfg"].get("vocab_size", CLIPTextCfg.vocab_size), tensor.shape[1])
            full[ids] = tensor
            tensor = full
        exported[name if own_text else name.removeprefix("text.")] = tensor
        if name.endswith(".running_var"):  # a frozen BatchNorm does not count, an ordinary one does
            exported.setdefault(name.replace("running_var", "num_batches_tracked"), torch.tensor(0))
    described = dict(architecture)
    if "logit_bias" in exported:
        described["init_logit_bias"] = exported["logit_bias"].item()  # without it open_clip builds no bias
    preprocess = {
        "size": image_size(architecture),
        "mean": list(open_clip.OPENAI_DATASET_MEAN),
        "std": list(open_clip.OPENAI_DATASET_STD),
        "interpolation": "bicubic",
        "resize_mode": "shortest",
    }
    return exported, {"model_cfg": described, "preprocess_cfg": preprocess}


def load_exported(folder: Path) -> tuple[Towers, dict[str, Any], int]:
    """An open_clip model folder, ours or another's, as towers; -> (towers, architecture, image size)."""
    try:
        description = json.loads((folder / "open_clip_config.json").read_text())
        architecture = description["model_cfg"]
        weights = safetensors.torch.load_file(folder / "open_clip_model.safetensors")
    except (OSError, json.JSONDecodeError, KeyError, safetensors.SafetensorError) as error:
        raise ConfigError(f"{folder} is no whole open_clip model folder: {error}") from error
    has_bias = "logit_bias" in weights
    # Another's BatchNorm is welcome: what was exported is only evaluated, where its statistics are fixed anyway.
    model = Model(freeze_batch_norm=True)
    towers = Towers(architecture, model, SigmoidLoss("sigmoid") if has_bias else SoftmaxLoss("softmax"))
    towers.load_state_dict(_from_open_clip(weights))
    return towers, architecture, image_size(architecture)
