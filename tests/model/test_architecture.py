"""What can be asked for, what is built, and what is refused in words."""

from __future__ import annotations

import math

import pytest
import torch

from clipscale.config.schema import Model, SigmoidLoss, SoftmaxLoss
from clipscale.errors import ConfigError
from clipscale.model.towers import build_towers, image_size, resolve_architecture

from .architectures import TEXT, VISION, convolutions, small

SOFTMAX = SoftmaxLoss("softmax")


def refusal(model: Model) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_architecture(model)
    return str(caught.value)


def test_a_name_alone_is_open_clips_own() -> None:
    architecture = resolve_architecture(Model(name="ViT-B-32"))
    assert architecture["embed_dim"] == 512
    assert architecture["vision_cfg"]["patch_size"] == 32
    assert image_size(architecture) == 224


def test_tables_override_single_keys_of_a_name() -> None:
    model = Model(name="ViT-B-32", vision_cfg={"layers": 3}, embed_dim=64, quick_gelu=True)
    architecture = resolve_architecture(model)
    named = resolve_architecture(Model(name="ViT-B-32"))
    assert architecture["vision_cfg"] == named["vision_cfg"] | {"layers": 3}
    assert architecture["text_cfg"] == named["text_cfg"]
    assert (architecture["embed_dim"], architecture["quick_gelu"]) == (64, True)
    assert resolve_architecture(Model(name="ViT-B-32")) == named  # open_clip's own table is left as it was


def test_an_unknown_name_is_answered_with_near_ones() -> None:
    message = refusal(Model(name="ViT-B32"))
    assert "open_clip knows no 'ViT-B32'; did you mean" in message
    assert "ViT-B-32" in message
    assert "did you mean" not in refusal(Model(name="completely different"))


def test_an_unknown_name_with_tables_that_do_not_stand_alone() -> None:
    message = refusal(Model(name="ViT-B-31", vision_cfg={"layers": 3}))
    assert "knows no 'ViT-B-31'" in message
    assert "ViT-B-32" in message


def test_every_fault_at_once() -> None:
    message = refusal(Model(vision_cfg=VISION | {"patchsize": 8}, text_cfg={"head": 2, "hf_proj_type": "mlp"}))
    assert "model.vision_cfg.patchsize: unknown key; did you mean patch_size" in message
    assert "model.text_cfg.head: unknown key; did you mean heads" in message
    assert "hf_proj_type" not in message
    assert "embed_dim is missing" in refusal(Model(vision_cfg=VISION, text_cfg=TEXT))
    assert "wanted a `name` of open_clip's list, or `embed_dim`" in refusal(Model())


def test_an_unknown_trunk() -> None:
    message = refusal(convolutions("test_convnexxt"))
    assert "timm knows no 'test_convnexxt'" in message
    assert "test_convnext" in message.split("did you mean")[1]


def test_caption_decoders_are_refused() -> None:
    assert "two towers" in refusal(Model(name="coca_ViT-B-32"))


def test_only_squares() -> None:
    assert image_size({"vision_cfg": {"image_size": [32, 32]}}) == 32
    with pytest.raises(ConfigError, match=r"found \[32, 64\], wanted a square"):
        image_size({"vision_cfg": {"image_size": [32, 64]}})


def test_what_open_clip_cannot_build_is_a_fault_of_the_request() -> None:
    with pytest.raises(ConfigError, match="the model cannot be built from"):
        build_towers(small(text_cfg=TEXT | {"heads": 5}), SOFTMAX)


@pytest.mark.parametrize(
    ("trunk", "first"), [("test_resnet", "visual.trunk.conv1.1"), ("test_byobnet", "visual.trunk.stem.bn")]
)
def test_batch_norm_is_refused_by_name(trunk: str, first: str) -> None:
    with pytest.raises(ConfigError, match=rf"BatchNorm layers \(the first: {first}"):
        build_towers(convolutions(trunk), SOFTMAX)


@pytest.mark.parametrize("trunk", ["test_convnext", "test_efficientnet_gn", "test_efficientnet_ln"])
def test_other_norms_are_welcome(trunk: str) -> None:
    towers, _ = build_towers(convolutions(trunk), SOFTMAX)
    features, _ = towers("image", torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    assert features.shape == (2, 16)


def test_features_have_unit_length_and_the_scale_starts_where_it_was_put() -> None:
    towers, _ = build_towers(small(), SoftmaxLoss("softmax", init_temperature=0.05))
    images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    tokens = torch.randint(1, 49000, (4, 24))
    for tower, inputs in (("image", images), ("text", tokens)):
        features, scalars = towers(tower, inputs)
        torch.testing.assert_close(features.norm(dim=1), torch.ones(len(inputs)))
        assert features.dtype == torch.float32
        assert scalars.tolist() == pytest.approx([math.log(20)])
    towers, _ = build_towers(small(), SigmoidLoss("sigmoid", init_temperature=0.1, init_bias=-7.0))
    assert towers("image", images)[1].tolist() == pytest.approx([math.log(10), -7.0])


def test_under_bf16_features_leave_in_fp32() -> None:
    images = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    torch.manual_seed(0)
    towers, _ = build_towers(small(), SOFTMAX, half=torch.bfloat16)
    torch.manual_seed(0)
    exact, _ = build_towers(small(), SOFTMAX)
    features, _ = towers("image", images)
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    apart = (features - exact("image", images)[0]).abs().max()
    assert 1e-5 < apart < 3e-2
    assert {parameter.dtype for parameter in towers.parameters()} == {torch.float32}
