"""What we write is an ordinary open_clip model: its names, its strict loading, its features, its preprocessing."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
import open_clip
import pytest
import safetensors.torch
import torch
from open_clip.model import CustomTextCLIP
from PIL import Image, ImageDraw

from clipscale.config.data import NoAugment, TextCaption
from clipscale.config.schema import Model, SigmoidLoss, SoftmaxLoss
from clipscale.data.decode import Decoder
from clipscale.data.write import write_token_table
from clipscale.errors import ConfigError
from clipscale.model.towers import (
    Tokenize,
    Towers,
    build_towers,
    clip_token_ids,
    load_exported,
    read_token_ids,
    resolve_architecture,
    to_open_clip,
)

from .architectures import CAPTIONS, TEXT, convolutions, small

SOFTMAX, SIGMOID = SoftmaxLoss("softmax"), SigmoidLoss("sigmoid")


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def table(folder: Path) -> str:
    write_token_table(folder / "tokens.json", CAPTIONS, clip_token_ids)
    return str(folder / "tokens.json")


def trained(model: Model, loss: SoftmaxLoss | SigmoidLoss) -> tuple[Towers, dict]:
    """Towers whose every weight, the log scale too, differs from where it starts."""
    torch.manual_seed(0)
    towers, architecture = build_towers(model, loss)
    with torch.no_grad():
        for parameter in towers.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return towers.eval(), architecture


def export(folder: Path, towers: Towers, model: Model, architecture: dict) -> Path:
    tensors, description = to_open_clip(towers.state_dict(), model, architecture)
    safetensors.torch.save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "open_clip_model.safetensors"
    )
    (folder / "open_clip_config.json").write_text(json.dumps(description))
    return folder


KINDS = {
    "ViT": (small(), SOFTMAX),
    "sigmoid": (small(), SIGMOID),
    "quick gelu": (small(quick_gelu=True), SOFTMAX),
    "timm, LayerNorm": (convolutions("test_convnext"), SOFTMAX),
    "timm, GroupNorm": (convolutions("test_efficientnet_gn"), SOFTMAX),
    "timm, frozen BatchNorm": (convolutions("test_resnet", freeze_batch_norm=True), SOFTMAX),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [False, True], ids=["whole table", "cut table"])
@pytest.mark.parametrize("own_text", [False, True], ids=["CLIP", "custom text"])
def test_plain_open_clip_loads_it_and_sees_the_same(
    kind: str, cut: bool, own_text: bool, images: torch.Tensor, tmp_path: Path
) -> None:
    model, loss = KINDS[kind]
    if cut:
        model = dataclasses.replace(model, token_ids=table(tmp_path))
    towers, architecture = trained(model, loss)
    if own_text:
        architecture = architecture | {"custom_text": True}
    folder = export(tmp_path, towers, model, architecture)

    theirs = open_clip.create_model(f"local-dir:{folder}").eval()  # strict
    assert isinstance(theirs, open_clip.CustomTextCLIP if own_text else open_clip.CLIP)
    written = safetensors.torch.load_file(folder / "open_clip_model.safetensors")
    assert written.keys() == theirs.state_dict().keys()
    assert {name: tensor.shape for name, tensor in written.items()} == {
        name: tensor.shape for name, tensor in theirs.state_dict().items()
    }
    mean, std = (
        torch.tensor(values).view(3, 1, 1) for values in (open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD)
    )
    ours_ids = Tokenize(model, architecture)(CAPTIONS)
    with torch.no_grad():
        found_images = theirs.encode_image((images / 255 - mean) / std, normalize=True)
        found_texts = theirs.encode_text(open_clip.tokenize(CAPTIONS, context_length=24), normalize=True)
        torch.testing.assert_close(found_images, towers("image", images)[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found_texts, towers("text", ours_ids)[0], rtol=1e-5, atol=1e-6)
    assert theirs.logit_scale.shape == ()
    assert torch.equal(theirs.logit_scale, towers.logits.log_scale[0])
    if loss is SIGMOID:
        assert torch.equal(theirs.logit_bias, towers.logits.bias[0])

    back, again, size = load_exported(folder)
    assert size == 32
    assert again["embed_dim"] == 16
    mine = dict(towers.state_dict())
    if cut:
        rows = read_token_ids(Path(model.token_ids))
        found = back.text.token_embedding.weight
        assert torch.equal(found[rows], mine.pop("text.token_embedding.weight"))
        others = torch.ones(len(found), dtype=torch.bool)
        others[rows] = False
        assert (found[others] == 0).all()
    state = back.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in mine.items())


def test_weights_that_were_not_gathered_are_never_written() -> None:
    towers, architecture = trained(small(), SOFTMAX)
    weights = towers.state_dict() | {"visual.proj": torch.empty(0)}
    with pytest.raises(AssertionError, match=r"visual\.proj"):
        to_open_clip(weights, small(), architecture)


def test_a_folder_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no whole open_clip model folder"):
        load_exported(tmp_path)
    towers, architecture = trained(small(), SOFTMAX)
    folder = export(tmp_path, towers, small(), architecture)
    weights = folder / "open_clip_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="is no whole open_clip model folder"):
        load_exported(folder)


def test_pretrained_weights_come_back(tmp_path: Path) -> None:
    towers, architecture = trained(small(), SOFTMAX)
    folder = export(tmp_path, towers, small(), architecture)
    for path in (folder, folder / "open_clip_model.safetensors"):
        loaded, _ = build_towers(small(pretrained=str(path)), SOFTMAX)
        assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in towers.state_dict().items())
    with pytest.raises(ConfigError, match="holds another model"):
        build_towers(small(pretrained=str(folder), text_cfg=TEXT | {"layers": 3}), SOFTMAX)
    with pytest.raises(ConfigError, match="no file at"):
        build_towers(small(pretrained=str(tmp_path / "absent")), SOFTMAX)


# ---- preprocessing ----------------------------------------------------------------------------------------------


def drawing(width: int, height: int) -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    pen = ImageDraw.Draw(image)
    for index in range(12):
        x, y = width * index // 12, height * (index * 5 % 12) // 12
        pen.ellipse((x, y, x + width // 4, y + height // 3), fill=(index * 20, 255 - index * 20, (index * 90) % 256))
    return image


@pytest.mark.parametrize("shape", [(32, 32), (64, 64), (100, 50), (47, 93), (20, 31), (500, 333)])
def test_evaluation_sees_images_as_open_clip_does(shape: tuple[int, int]) -> None:
    model = small()
    description = to_open_clip(trained(model, SOFTMAX)[0].state_dict(), model, resolve_architecture(model))[1]
    theirs = open_clip.transform.image_transform_v2(
        open_clip.transform.PreprocessCfg(**description["preprocess_cfg"]), is_train=False
    )
    image = drawing(*shape)
    file = io.BytesIO()
    image.save(file, "PNG")
    ours, _ = Decoder(32, NoAugment("none"), TextCaption("text"))({"png": file.getvalue(), "txt": b"a"})
    mean, std = (np.array(description["preprocess_cfg"][name])[:, None, None] for name in ("mean", "std"))
    wanted = (theirs(image).numpy() * std + mean) * 255
    apart = np.abs(ours.numpy() - wanted)
    assert apart.max() <= 2
    assert apart.mean() < 0.2


def test_positions_are_interpolated_as_open_clip_does(tmp_path: Path) -> None:
    """From 32 px and short captions to 64 px and longer ones: CLIPA's second stage."""
    towers, architecture = trained(small(), SOFTMAX)
    folder = export(tmp_path, towers, small(), architecture)
    larger = small(
        pretrained=str(folder),
        vision_cfg=architecture["vision_cfg"] | {"image_size": 64},
        text_cfg=architecture["text_cfg"] | {"context_length": 40},
    )
    loaded, built = build_towers(larger, SOFTMAX)
    reference = CustomTextCLIP(built["embed_dim"], built["vision_cfg"], built["text_cfg"])
    open_clip.factory.load_checkpoint(reference, str(folder / "open_clip_model.safetensors"))
    for name in ("visual.positional_embedding", "text.positional_embedding"):
        assert loaded.state_dict()[name].shape != towers.state_dict()[name].shape
        torch.testing.assert_close(loaded.state_dict()[name], reference.state_dict()[name], msg=name)


@pytest.mark.parametrize("tower", ["image", "text"])
def test_one_tower_alone_may_be_pretrained(tower: str, tmp_path: Path) -> None:
    towers, architecture = trained(small(), SOFTMAX)
    folder = export(tmp_path, towers, small(), architecture)
    torch.manual_seed(9)
    loaded, _ = build_towers(small(pretrained=str(folder), pretrained_towers=(tower,)), SOFTMAX)
    torch.manual_seed(9)
    fresh, _ = build_towers(small(), SOFTMAX)
    taken = {"image": "visual.", "text": "text."}[tower]
    for name, weight in loaded.state_dict().items():
        source = towers if name.startswith(taken) else fresh
        assert torch.equal(weight, source.state_dict()[name]), name
