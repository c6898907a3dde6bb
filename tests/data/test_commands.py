"""`clipscale data make, index, check, stats`: tables and exit codes of the commands themselves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from clipscale.cli import main

from .shard_files import members, picture, write_shards, write_tar
from .test_make import write_table

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def clipscale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """-> exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["clipscale", "data", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        captured = capsys.readouterr()
        return int(left.value.code or 0), captured.out, captured.err

    return run


def test_from_a_table_to_sound_shards(clipscale: Command, tmp_path: Path) -> None:
    table = write_table(tmp_path, 50, "pairs.tsv", "\t")
    out = tmp_path / "out"
    code, said, _ = clipscale("make", table, "--out", out, "--samples-per-shard", 20, "--separator", "tab")
    assert (code, said) == (0, f"{out}: 50 samples in 3 shards\n")
    code, said, _ = clipscale("index", out)
    assert code == 0
    assert "3 shards" in said
    assert said.endswith("50 samples, 0.1 MB; fields png txt; 0 walked\n")  # `make` had indexed them
    assert clipscale("check", out)[:2] == (0, "sound: 50 samples in 3 shards\n")
    code, _, told = clipscale("make", table, "--out", out)
    assert (code, "is not empty" in told) == (2, True)
    code, _, told = clipscale("make", table, "--out", tmp_path / "new", "--separator", ",")
    assert code == 3
    assert "its separator seems to be a tab" in told
    assert clipscale("make", tmp_path / "absent.csv", "--out", tmp_path / "new")[0] == 3
    assert clipscale("make", table, "--out", tmp_path / "new", "--separator", "ab")[0] == 2


def test_check_names_every_fault_by_shard_and_key(clipscale: Command, tmp_path: Path) -> None:
    sound = write_shards(tmp_path, [4, 4])
    clipscale("index", tmp_path)
    write_shards(tmp_path, [3])  # one less than the index says
    image = picture()
    bad = {
        "no_image": [("0.txt", b"number 0")],
        "decode_error": [("1.jpg", b"<html>"), ("1.txt", b"number 1")],
        "no_caption": [("2.png", image)],
        "empty_caption": [("3.png", image), ("3.txt", b" ")],
        "not_utf8": [("4.png", image), ("4.txt", b"\xff")],
        "caption_too_long": [("5.png", image), ("5.txt", b"word " * 90)],
        "too_large": [("6.png", picture(size=(40, 40))), ("6.txt", b"number 6")],
    }
    write_tar(tmp_path / "bad.tar", [member for found in bad.values() for member in found])
    write_tar(tmp_path / "apart.tar", [*members(0)[:1], *members(1), *members(0)[1:]])
    (tmp_path / "cut.tar").write_bytes(Path(sound[1]).read_bytes()[:3333])
    (tmp_path / "empty.tar").touch()
    report = tmp_path / "report.json"
    code, said, told = clipscale("check", tmp_path, f"{tmp_path}/absent.tar", "--max-pixels", 1000, "--json", report)
    assert code == 3
    assert f"{tmp_path}/absent.tar: nothing there" in said
    for key, reason in enumerate(bad):
        assert f"bad.tar: {key}: {reason}" in said
    for line in (
        "apart.tar: key '00000' comes again",
        "cut.tar: cut inside",
        "empty.tar: the file is empty",
        "s-000.tar: holds 3 samples where the index says 4",
    ):
        assert line in said
    assert "s-001.tar" not in said
    assert "fault(s) in 6 of 7 shards" in told
    assert "Traceback" not in told
    faults = json.loads(report.read_text())["faults"]
    assert {fault["key"] for fault in faults if fault["shard"].endswith("bad.tar")} == set("0123456")
    code, said, _ = clipscale("check", tmp_path / "bad.tar", "--no-decode", "--max-tokens", 0)
    assert code == 3
    assert "decode_error" not in said
    assert "too_long" not in said


def test_check_of_another_caption_field(clipscale: Command, tmp_path: Path) -> None:
    write_shards(tmp_path, [3])
    assert clipscale("check", tmp_path, "--caption", "json:label")[0] == 0
    assert clipscale("check", tmp_path, "--caption", "json:title")[0] == 3


def test_stats_are_those_of_the_samples(clipscale: Command, tmp_path: Path) -> None:
    sizes = [(10, 20), (30, 40), (50, 60), (50, 60)]
    captions = ["a", "bbb", "bbb", "ccccc"]
    written = []
    for number, (size, caption) in enumerate(zip(sizes, captions, strict=True)):
        written += [(f"{number}.png", picture(number // 3, size)), (f"{number}.txt", caption.encode())]
    path = write_tar(tmp_path / "a.tar", [*written, ("9.txt", b"x")])
    report, plot = tmp_path / "stats.json", tmp_path / "stats.png"
    code, said, _ = clipscale("stats", path, "--json", report, "--plot", plot)
    assert code == 0
    found = json.loads(report.read_text())
    assert (found["shards"], found["samples"], found["bytes"]) == (1, 5, Path(path).stat().st_size)
    assert found["fields"] == {"png": 4, "txt": 5}
    assert [found["width"][name] for name in ("min", "median", "max")] == [10, 40, 50]
    assert [found["height"][name] for name in ("min", "median", "max")] == [20, 50, 60]
    assert [found["caption_characters"][name] for name in ("min", "median", "max")] == [1, 3, 5]
    assert found["repeated_captions"] == 1
    assert found["repeated_images"] == 0
    assert found["unusable"] == {"no_image": 1}
    assert "repeated captions" in said
    with Image.open(plot) as image:
        assert image.size[0] > 500
    assert clipscale("stats", path, "--json", Path(path) / "x.json")[0] == 2  # a shard is no folder
    assert clipscale("stats", tmp_path / "absent.tar")[0] == 3
