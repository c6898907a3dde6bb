"""Configuration files and --set: every fault at once, with its path, its source and a way out."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from clipscale.config.data import CropAugment, NoAugment
from clipscale.config.load import load_config, to_toml
from clipscale.config.optim import AdamW, CosineSchedule, Lamb, PolynomialSchedule, Rule
from clipscale.config.schema import (
    Config,
    DeepSpeedEngine,
    PlainEngine,
    RetrievalEval,
    ZeroShotEval,
)
from clipscale.config.values import Duration
from clipscale.errors import ConfigError
from tests.helpers.runs import REPOSITORY

SMALL = """
[train]
global_batch = 64
duration = { steps = 30 }

[data]
shards = "train"

[model]
name = "ViT-B-32"

[optim]
kind = "adamw"
lr = 5e-4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def faults(path: Path, *settings: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, settings)
    headline, *lines = str(caught.value).splitlines()
    number = "1 fault" if len(lines) == 1 else f"{len(lines)} faults"
    assert headline == f"{number} in the configuration:"
    assert all(line.startswith("  - ") for line in lines)
    return [line[4:] for line in lines]


def test_defaults_fill_what_a_file_leaves_out(file: Path) -> None:
    config = load_config(file)
    assert config.train.global_batch == 64
    assert config.train.duration == Duration(steps=30)
    assert config.engine == PlainEngine("plain")
    assert config.optim == AdamW(kind="adamw", lr=5e-4)
    assert config.data.augment == NoAugment("none")


def test_every_fault_is_named_at_once_with_its_path_and_source(file: Path) -> None:
    file.write_text(
        SMALL.replace("lr = 5e-4", 'lr = "fast"\nbetas = [0.9]\nmomentum = 2').replace(
            "global_batch = 64", "global_batches = 64\nimage_chunk = 0"
        )
        + '[engine]\nkind = "plane"\n'
    )
    found = faults(file, "data.workers=-1", "train.text_chunk=3.5", "run.sed=1", "train.duration.samples=2.5")
    text = "\n".join(found)
    for part in (
        f"train.global_batch is missing in {file}",
        f"train.global_batches ({file}): unknown key; did you mean train.global_batch?",
        f"train.image_chunk ({file}): found 0, wanted greater than or equal to 1 or 'whole'",
        "train.text_chunk (--set train.text_chunk=3.5): found 3.5, wanted an integer or 'whole'",
        f"optim.lr ({file}): found 'fast', wanted a number",
        f"optim.betas ({file}): found [0.9], wanted at least 2 values",
        f"optim.momentum ({file}): unknown key here; momentum belongs to another kind",
        f"engine ({file}): found kind 'plane', wanted one of plain, deepspeed, hsdp",
        "data.workers (--set data.workers=-1): found -1, wanted greater than or equal to 0",
        "run.sed (--set run.sed=1): unknown key; did you mean run.seed?",
        "train.duration.samples (--set train.duration.samples=2.5): found 2.5, wanted an integer",
    ):
        assert part in text
    assert len(found) == 11


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("train.global_batch='64'", "found '64', wanted an integer"),
        ("train.global_batch=64.0", "found 64.0, wanted an integer"),
        ("train.global_batch=true", "found True, wanted an integer"),
        ("train.global_batch=0", "found 0, wanted greater than or equal to 1"),
        ("optim.lr=true", "found True, wanted a number"),
        ("optim.lr=0", "found 0, wanted greater than 0"),
        ("optim.lr=inf", "finite"),
        ("optim.betas=[0.9, 1.0]", "less than 1"),
        ("optim.betas=[0.9, 0.95, 0.99]", "found [0.9, 0.95, 0.99], wanted a shorter list"),
        ("train.image_chunk=all", "found 'all', wanted an integer or 'whole'"),
        ("train.precision=fp8", "found 'fp8', wanted 'fp32', 'bf16' or 'fp16'"),
        (
            "optim={lr=1.0}",
            "optim (--set optim={lr=1.0}): found no kind, wanted one of adamw, lamb, lars, lion, sgd, muon",
        ),
        ("optim.schedule={kind='cosin'}", "found kind 'cosin', wanted one of cosine, polynomial, constant, wsd"),
        ("optim.rules=[{lr_scale=0.1}]", "optim.rules.match is missing"),
        ("optim.image_layer_decay=0.0", "found 0.0, wanted greater than 0"),
        ("data.shards=3", "found 3, wanted text in quotes"),
        ("data.shards=[1]", "found [1], wanted text in quotes"),
        ("model.activation_checkpointing=1", "found 1, wanted true or false"),
        ("model.vision_cfg=32", "found 32, wanted a table"),
        ("train=5", "found 5, wanted a table"),
        ("run.seed=-1", "found -1"),
        ("train.duration={}", "found none, wanted exactly one of steps, samples, epochs, fraction"),
        ("train.duration={steps=1, epochs=2}", "found steps and epochs, wanted exactly one of"),
        ("train.duration.fraction=1.5", "less than or equal to 1"),
        ("engine.zero_stage=1", "engine.zero_stage (--set engine.zero_stage=1): found 1, wanted 0"),
        ("engine={kind='plain', zero_stage=1}", "found 1, wanted 0"),
        ("data.caption={field='txt'}", "found no kind, wanted one of text, label_and_tags"),
        ("data.augment={}", "found no kind, wanted one of none, crop, affine"),
        ("eval=[{kind='retrieval', shards='x'}]", "eval.name is missing"),
        ("eval=[{kind='retrieval', name='x', shards='x', label='y'}]", "unknown key"),
    ],
)
def test_types_are_strict(file: Path, setting: str, wanted: str) -> None:
    found = faults(file, setting)
    assert len(found) <= 2
    assert wanted in "\n".join(found)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("train.global_batc=1", "did you mean train.global_batch?"),
        ("trian.global_batch=1", "did you mean train?"),
        ("optim.weight_dekay=1", "did you mean optim.weight_decay?"),
        ("run.colour=1", "known here: seed"),
        ("engine={kind='plain', zero_stag=1}", "did you mean engine.zero_stage?"),
        ("train.duration.step=1", "did you mean train.duration.steps?"),
    ],
)
def test_an_unknown_key_is_answered_with_a_known_one(file: Path, setting: str, wanted: str) -> None:
    found = "\n".join(faults(file, setting))
    assert f"(--set {setting}): unknown key" in found
    assert wanted in found


def test_no_file_and_no_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file at .*absent"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("[train\n")
    with pytest.raises(ConfigError, match=r"broken\.toml is not valid TOML: .*line 1"):
        load_config(broken)
    broken.write_bytes(b'[run]\nname = "caf\xe9"\n')
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(broken)


# ---- --set ------------------------------------------------------------------------------------------------------


def test_values_of_every_kind(file: Path) -> None:
    config = load_config(
        file,
        [
            "train.global_batch = 128",
            "optim.lr=1",
            "optim.betas=[0.8, 0.95]",
            "data.shards=some/{00..11}.tar",
            "model.name='ViT-L-14'",
            "model.vision_cfg.image_size=64",
            "model.text_cfg={width = 32, heads = 2}",
            "model.activation_checkpointing=true",
            "run.seed=7",
            "train.image_chunk=whole",
            "eval=[{kind='zeroshot', name='a', shards=['x', 'y']}]",
        ],
    )
    assert config.train.global_batch == 128
    assert config.optim.lr == 1.0
    assert config.optim.betas == (0.8, 0.95)
    assert config.data.shards == "some/{00..11}.tar"
    assert config.model.name == "ViT-L-14"
    assert config.model.vision_cfg == {"image_size": 64}
    assert config.model.text_cfg == {"width": 32, "heads": 2}
    assert config.model.activation_checkpointing is True
    assert config.run.seed == 7
    assert config.train.image_chunk == "whole"
    assert config.eval == (ZeroShotEval("zeroshot", "a", ("x", "y")),)


def test_the_last_setting_wins_and_text_may_hold_equal_signs(file: Path) -> None:
    config = load_config(file, ["run.seed=1", "run.seed=2", "data.shards=a=b/c.tar"])
    assert config.run.seed == 2
    assert config.data.shards == "a=b/c.tar"


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ("train.global_batch", "wanted section.key=value"),
        ("=5", "wanted section.key=value"),
        ("train..global_batch=5", "wanted section.key=value"),
        ("train.global_batch.x=5", "train.global_batch is a value, not a table"),
        ("eval.name=x", "eval is a list; edit the file instead"),
        ("eval.0.name=x", "eval is a list; edit the file instead"),
    ],
)
def test_bad_forms(file: Path, setting: str, wanted: str) -> None:
    file.write_text(SMALL + "[[eval]]\nkind = 'retrieval'\nname = 'x'\nshards = 'y'\n")
    (found,) = faults(file, setting)
    assert setting.split("=")[0] in found
    assert wanted in found


def test_faults_of_form_and_of_value_come_together(file: Path) -> None:
    assert len(faults(file, "nothing", "run.seed=x")) == 2


def test_a_new_kind_drops_what_only_the_old_one_had(file: Path) -> None:
    file.write_text(
        SMALL + "[engine]\nkind = 'deepspeed'\nzero_stage = 2\n"
        "[data.augment]\nkind = 'affine'\ndegrees = 5.0\nscale = [0.5, 1.0]\nflip = 0.5\n"
    )
    assert load_config(file, ["engine.kind=plain"]).engine == PlainEngine("plain")
    assert load_config(file, ["engine.kind=deepspeed"]).engine == DeepSpeedEngine("deepspeed", 2)
    # What both kinds know stays; `degrees` goes.
    crop = load_config(file, ["data.augment.kind=crop"]).data.augment
    assert crop == CropAugment("crop", scale=(0.5, 1.0), flip=0.5)
    assert load_config(file, ["data.augment.kind=none"]).data.augment == NoAugment("none")
    # The order of settings counts: what is set for the new kind afterwards stays.
    assert load_config(file, ["engine.kind=deepspeed", "engine.zero_stage=3"]).engine == DeepSpeedEngine("deepspeed", 3)


def test_a_kind_for_a_table_that_the_file_leaves_out(file: Path) -> None:
    config = load_config(file, ["engine.kind=deepspeed", "engine.zero_stage=3"])
    assert config.engine == DeepSpeedEngine("deepspeed", 3)


def test_a_new_unit_replaces_the_old_one(file: Path) -> None:
    assert load_config(file, ["train.duration.epochs=2"]).train.duration == Duration(epochs=2)
    assert load_config(file, ["train.save_every.samples=500"]).train.save_every == Duration(samples=500)
    assert load_config(file, ["optim.warmup.steps=5", "optim.warmup.fraction=0.5"]).optim.warmup == Duration(
        fraction=0.5
    )


# ---- back to TOML -----------------------------------------------------------------------------------------------


def test_round_trip(file: Path, tmp_path: Path) -> None:
    config = load_config(
        file,
        [
            "engine.kind=deepspeed",
            "data.augment.kind=crop",
            "data.caption.kind=label_and_tags",
            "data.shards=['a', 'b \"quoted\"']",
            "optim.lr=1.2345678901234567e-5",
            "train.save_every.epochs=0.25",
            "train.image_chunk=whole",
            "model.vision_cfg={layers = [1, 2, 3, 4], act_kwargs = {approximate = 'tanh'}}",
            "eval=[{kind='retrieval', name='a', shards='x'}, {kind='zeroshot', name='b', shards=['y'], label='cls'}]",
        ],
    )
    assert isinstance(config.eval[0], RetrievalEval)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert load_config(again) == config
    assert to_toml(load_config(again)) == to_toml(config)


def test_configurations_are_frozen(file: Path) -> None:
    config = load_config(file)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.global_batch = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("**/*.toml")), ids=lambda path: path.stem)
def test_every_shipped_file_loads_and_says_what_it_is_for(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, Config)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert load_config(again) == config
    assert path.read_text().startswith("# ")
    json.dumps(dataclasses.asdict(config))


def test_the_whole_recipe_reads_back(file: Path, tmp_path: Path) -> None:
    settings = (
        "optim.kind=lamb",
        "optim.schedule={kind='polynomial', power=2.0, final=0.1}",
        "optim.rules=[{match='visual.*', lr_scale=0.1}, {match='*.bias', weight_decay=0.0, adapt=false}]",
        "optim.lr_rule=sqrt",
    )
    config = load_config(file, settings)
    assert config.optim == Lamb(
        kind="lamb",
        lr=5e-4,
        schedule=PolynomialSchedule("polynomial", power=2.0, final=0.1),
        rules=(Rule("visual.*", lr_scale=0.1), Rule("*.bias", weight_decay=0.0, adapt=False)),
        lr_rule="sqrt",
    )
    path = tmp_path / "again.toml"
    path.write_text(to_toml(config))
    assert load_config(path) == config
    assert load_config(path, ["optim.schedule.kind=cosine"]).optim.schedule == CosineSchedule("cosine", final=0.1)
