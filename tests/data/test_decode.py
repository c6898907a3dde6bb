"""Images arrive as people see them, captions as they were written, or the sample is dropped for a reason."""

from __future__ import annotations

import io
import json
import pickle
import struct
import subprocess
import sys
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from clipscale.config.data import (
    AffineAugment,
    Augment,
    Caption,
    ChoiceCaption,
    CropAugment,
    LabelAndTagsCaption,
    NoAugment,
    TextCaption,
)
from clipscale.data.assign import sample_rng
from clipscale.data.captions import Unusable, read_caption
from clipscale.data.decode import Decoder, read_image

from .shard_files import PLAIN, picture, pixels

RNG = sample_rng(0, 0, 0)
WHITE, RED = [255, 255, 255], [255, 0, 0]
RULES = [NoAugment("none"), CropAugment("crop", scale=(0.3, 1.0), flip=0.5), AffineAugment("affine", flip=0.5)]


def image_of(data: bytes, extension: str = "png") -> torch.Tensor:
    return PLAIN({extension: data, "txt": b"a"})[0]


def read(data: bytes) -> np.ndarray:
    image = read_image(data, 10**7)
    assert image.mode == "RGB"
    return np.asarray(image)


def reason(members: dict[str, bytes], decoder: Decoder = PLAIN) -> str:
    with pytest.raises(Unusable) as caught:
        decoder(members)
    return caught.value.reason


def caption(members: dict[str, bytes], rule: Caption) -> str:
    return read_caption(members, rule, RNG)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds no pixel."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + header + struct.pack(">I", 99) + b"IDAT"


def photo(width: int, height: int) -> np.ndarray:
    """Smooth, so that no two ways of shrinking it differ much, and without any symmetry."""
    y, x = np.mgrid[:height, :width] / max(width, height)
    return (np.stack([x, y, np.sin(3 * x + 2 * y) ** 2], -1) * 250).astype(np.uint8)


# --- images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_every_format_is_decoded_whatever_its_extension_says(kind: str) -> None:
    for extension in ("jpg", "jpeg", "png", "webp"):
        image = image_of(picture(90, kind=kind), extension)
        assert (image.dtype, image.shape) == (torch.uint8, (3, 4, 4))
        assert (image.int() - 90).abs().max() <= 2


@pytest.mark.parametrize(
    "data", [b"", b"<html>404</html>", bytes(range(256)) * 20, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_junk_is_a_decode_error(data: bytes) -> None:
    assert reason({"jpg": data, "txt": b"a"}) == "decode_error"


@pytest.mark.parametrize(
    ("kind", "options"), [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("WEBP", {})]
)
def test_half_an_image_is_dropped_not_repaired(kind: str, options: dict) -> None:
    whole = pixels(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8), kind, **options)
    assert reason({"png": whole[: len(whole) // 2], "txt": b"a"}) == "decode_error"


def test_importing_leaves_pillows_global_switches_alone() -> None:
    code = (
        "import clipscale.data.loader; from PIL import Image, ImageFile;"
        "assert not ImageFile.LOAD_TRUNCATED_IMAGES; assert Image.MAX_IMAGE_PIXELS == 89478485"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_pixel_limit_is_read_from_the_header() -> None:
    small = replace(PLAIN, max_pixels=99)
    assert reason({"png": picture(size=(10, 10)), "txt": b"a"}, small) == "too_large"
    assert small({"png": picture(size=(9, 11)), "txt": b"a"})[0].shape == (3, 4, 4)
    for side in (9000, 10_100, 20_000):  # fine, a warning and an error to Pillow itself
        assert reason({"png": png_header(side, side), "txt": b"a"}, replace(PLAIN, max_pixels=10**6)) == "too_large"
    assert reason({"png": png_header(20_000, 20_000), "txt": b"a"}, replace(PLAIN, max_pixels=10**9)) == "too_large"


def test_transparency_shows_white() -> None:
    clear_red = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear_red.putpixel((1, 0), (255, 0, 0, 255))
    grey = Image.new("LA", (2, 1), (0, 0))
    grey.putpixel((1, 0), (0, 255))
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    palette.putpixel((1, 0), 1)
    keyed = Image.new("RGB", (2, 1), (255, 0, 0))
    keyed.putpixel((1, 0), (0, 0, 255))
    assert read(saved(clear_red)).tolist() == [[WHITE, RED]]
    assert read(saved(clear_red, "WEBP", lossless=True)).tolist() == [[WHITE, RED]]
    assert read(saved(grey)).tolist() == [[WHITE, [0, 0, 0]]]
    assert read(saved(palette, transparency=0)).tolist() == [[WHITE, [0, 0, 255]]]
    assert read(saved(palette, transparency=b"\x00\xff")).tolist() == [[WHITE, [0, 0, 255]]]
    assert read(saved(palette)).tolist() == [[RED, [0, 0, 255]]]
    assert read(saved(keyed, transparency=(255, 0, 0))).tolist() == [[WHITE, [0, 0, 255]]]
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 51))
    assert read(saved(half)).tolist() == [[[204, 204, 204]]]


def test_sixteen_bit_grey_is_scaled() -> None:
    grey = np.array([[0, 128 * 257, 65535, 1000]], np.uint16)
    expected = [[[0] * 3, [128] * 3, [255] * 3, [4] * 3]]
    assert read(pixels(grey)).tolist() == expected
    assert read(pixels(grey, "TIFF")).tolist() == expected
    assert reason({"tif": pixels(np.array([[70_000]], np.int32), "TIFF"), "txt": b"a"}) == "decode_error"
    assert reason({"tif": pixels(np.array([[0.5]], np.float32), "TIFF"), "txt": b"a"}) == "decode_error"


@pytest.mark.parametrize("mode", ["1", "L", "CMYK", "YCbCr"])
def test_other_colour_spaces_become_rgb(mode: str) -> None:
    image = Image.new("RGB", (8, 8), (255, 255, 255) if mode in ("1", "L") else (200, 40, 90)).convert(mode)
    expected = image.convert("RGB")
    kind = "PNG" if mode in ("1", "L") else "JPEG"
    close = np.abs(read(saved(image, kind)).astype(int) - np.asarray(expected).astype(int))
    assert close.max() <= 6


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_image_is_upright(orientation: int, kind: str) -> None:
    upright = Image.fromarray(photo(16, 8))
    undo = {5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE}
    undo |= {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM}
    undo |= {8: Image.Transpose.ROTATE_270}
    stored = upright if orientation == 1 else upright.transpose(undo[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = read(saved(stored, kind, exif=exif)).astype(int)
    assert shown.shape == (8, 16, 3)
    assert np.abs(shown - np.asarray(upright).astype(int)).mean() < 8


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # as loader workers have it
def test_broken_exif_does_not_drop_the_image() -> None:
    for exif in (b"Exif\0\0rubbish", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff", b"\0"):
        assert read(picture(9, kind="JPEG", exif=exif)).shape == (4, 4, 3)


# --- sizes and augmentation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (97, 64), (64, 131), (20, 33), (32, 32), (33, 32), (500, 37)])
def test_no_augmentation_is_clips_own_preprocessing(shape: tuple[int, int]) -> None:
    data = pixels(photo(*shape))
    theirs = v2.Compose([v2.Resize(32, v2.InterpolationMode.BICUBIC), v2.CenterCrop(32), v2.PILToTensor()])
    ours, _ = Decoder(32, NoAugment("none"), None)({"png": data})
    assert torch.equal(ours, theirs(read_image(data, 10**7)))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 90), (300, 2), (40, 64)])
def test_any_image_gets_the_asked_size(rule: Augment, shape: tuple[int, int]) -> None:
    for sample in range(10):
        assert Decoder(32, rule, None)({"png": pixels(photo(*shape))}, sample=sample)[0].shape == (3, 32, 32)


@pytest.mark.parametrize("rule", [*RULES[1:], LabelAndTagsCaption("label_and_tags")])
def test_choices_depend_on_seed_epoch_and_sample_alone(rule: Augment | LabelAndTagsCaption) -> None:
    decoder = Decoder(8, NoAugment("none"), rule) if rule.kind == "label_and_tags" else Decoder(8, rule, None)
    tags = [str(number) for number in range(50)]
    members = {"png": pixels(photo(20, 20)), "json": json.dumps({"label": "x", "tags": tags}).encode()}

    def made(decoder: Decoder, **where: int) -> list[str]:
        results = [decoder(members, **{"epoch": 1, "sample": sample} | where) for sample in range(5, 11)]
        return [caption + str(image.tolist()) for image, caption in results]

    first = made(decoder)
    torch.manual_seed(1)
    assert made(pickle.loads(pickle.dumps(decoder))) == first
    assert made(decoder, epoch=2) != first
    assert made(replace(decoder, seed=1)) != first
    assert len(set(first)) > 3


def test_an_affine_change_of_nothing_is_a_plain_resize() -> None:
    still = AffineAugment("affine", degrees=0, translate=0, scale=(1.0, 1.0))
    for side in (32, 64, 200):
        data = pixels(photo(side, side))
        ours, _ = Decoder(32, still, None)({"png": data})
        plain, _ = Decoder(32, NoAugment("none"), None)({"png": data})
        assert (ours.int() - plain.int()).abs()[:, 1:-1, 1:-1].max() <= 6


def test_an_affine_change_moves_zooms_and_turns_about_the_centre_onto_white() -> None:
    data = np.full((64, 64, 3), 255, np.uint8)
    data[28:36, 28:36] = 0  # a dark square in the middle
    centres, areas = [], []
    rule = AffineAugment("affine", degrees=45, translate=0.2, scale=(0.5, 2.0))
    for sample in range(200):
        image, _ = Decoder(32, rule, None)({"png": pixels(data)}, sample=sample)
        dark = 1 - image[0].double() / 255
        areas.append(float(dark.sum()))
        x = torch.arange(32) + 0.5
        centres.append([float((dark.sum(0) * x).sum() / dark.sum()), float((dark.sum(1) * x).sum() / dark.sum())])
        assert image[:, 0, 0].tolist() == WHITE
    low, high = np.min(centres, 0), np.max(centres, 0)
    assert np.allclose(low, 16 - 0.2 * 32, atol=0.5)
    assert np.allclose(high, 16 + 0.2 * 32, atol=0.5)
    assert np.allclose([min(areas), max(areas)], [16 * 0.25, 16 * 4], rtol=0.15)


def test_flips_happen_as_often_as_asked() -> None:
    data = pixels(photo(32, 32))  # red grows to the right
    for rule in (CropAugment("crop", flip=0.25), AffineAugment("affine", flip=0.25)):
        flipped = 0
        for sample in range(400):
            image, _ = Decoder(8, rule, None)({"png": data}, sample=sample)
            flipped += int(image[0, 3, 1] > image[0, 3, 6])
        assert 70 < flipped < 130


def test_crops_cover_the_asked_share_of_the_area() -> None:
    data = pixels(photo(100, 100))
    for low, high in ((0.1, 0.1), (1.0, 1.0)):
        rule = CropAugment("crop", scale=(low, high), ratio=(1.0, 1.0))
        for sample in range(20):
            image, _ = Decoder(16, rule, None)({"png": data}, sample=sample)
            spread = (int(image[0].max()) - int(image[0].min())) / 250
            assert abs(spread - low**0.5) < 0.08


@pytest.mark.parametrize("rule", RULES)
def test_draft_mode_is_close_and_never_too_small(rule: Augment) -> None:
    for shape in ((640, 480), (300, 900), (70, 64)):
        data = pixels(photo(*shape), "JPEG", quality=95)
        full, _ = Decoder(32, rule, None)({"jpg": data}, sample=3)
        draft, _ = Decoder(32, rule, None, draft=True)({"jpg": data}, sample=3)
        assert (full.int() - draft.int()).abs().double().mean() < 2
    smaller = read_image(pixels(photo(640, 480), "JPEG"), 10**7, draft_side=32)
    assert smaller.size == (80, 60)


# --- captions -----------------------------------------------------------------------------------------------------


def test_captions_are_strict_utf8_without_a_byte_order_mark() -> None:
    text = TextCaption("text")
    assert caption({"txt": " caf\u00e9 \n".encode()}, text) == "caf\u00e9"
    assert caption({"txt": b"\xef\xbb\xbfmarked"}, text) == "marked"
    for data in (b"caf\xe9", b"quote \x92", "utf-16".encode("utf-16"), b"\xed\xa0\x80"):
        assert reason({"png": picture(), "txt": data}) == "not_utf8"


def test_missing_and_empty_captions_are_dropped() -> None:
    assert reason({"png": picture()}) == "no_caption"
    for blank in (b"", b"   ", b"\n\t", b"\xef\xbb\xbf", "\u3000".encode()):
        assert reason({"png": picture(), "txt": blank}) == "empty_caption"
    assert Decoder(4, NoAugment("none"), None)({"png": picture()})[1] == ""


def test_an_image_is_needed() -> None:
    assert reason({"txt": b"a", "json": b"{}"}) == "no_image"


def test_captions_from_other_fields() -> None:
    members = {"caption": b"plain", "json": json.dumps({"Caption": "inner", "n": 3, "none": None}).encode()}
    assert caption(members, TextCaption("text", "caption")) == "plain"
    assert caption(members, TextCaption("text", "json:Caption")) == "inner"
    for field, why in (("json:n", "no_caption"), ("json:none", "no_caption"), ("json:x", "no_caption")):
        assert reason(members, Decoder(4, NoAugment("none"), TextCaption("text", field))) == why
    for broken in (b"{", b"[1]", b"", b"3"):
        decoder = Decoder(4, NoAugment("none"), TextCaption("text", "json:Caption"))
        assert reason({"png": picture(), "json": broken}, decoder) == "bad_json"


def test_one_of_several_captions_is_drawn_in_proportion() -> None:
    rule = ChoiceCaption("choice", {"txt": 1.0, "json:long": 3.0, "json:list": 4.0})
    meta = json.dumps({"long": "long", "list": ["one", " ", "two", 5, "three"]}).encode()
    whole = {"txt": b"short", "json": meta}

    def drawn(members: dict[str, bytes]) -> Counter[str]:
        return Counter(read_caption(members, rule, sample_rng(0, 0, number)) for number in range(4000))

    found = drawn(whole)
    expected = {"short": 500, "long": 1500, "one": 667, "two": 667, "three": 667}
    assert found.keys() == expected.keys()
    assert all(abs(found[caption] - count) < 100 for caption, count in expected.items())
    without = drawn({"txt": b" ", "json": json.dumps({"long": "long"}).encode()})  # what is missing is passed over
    assert without == {"long": 4000}
    with pytest.raises(Unusable, match="no_caption"):
        read_caption({}, rule, sample_rng(0, 0, 0))
    with pytest.raises(Unusable, match=r"empty_caption|no_caption"):
        read_caption({"txt": b""}, rule, sample_rng(0, 0, 0))


def test_half_a_character_escaped_in_json_is_not_utf8() -> None:
    decoder = Decoder(4, NoAugment("none"), TextCaption("text", "json:caption"))
    assert reason({"png": picture(), "json": rb'{"caption": "a \ud83d b"}'}, decoder) == "not_utf8"
    assert decoder({"png": picture(), "json": rb'{"caption": "\ud83d\ude00"}'})[1] == "\U0001f600"


def test_label_and_tags_come_in_the_asked_shares() -> None:
    members = {"json": json.dumps({"label": "L", "tags": ["a", "b", "c", "d", "", 5]}).encode()}
    rule = LabelAndTagsCaption("label_and_tags", label_only=0.3, tags_only=0.2, max_tags=3)
    kinds: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    for sample in range(2000):
        words = read_caption(members, rule, sample_rng(0, 0, sample)).split(", ")
        kinds["label" if words == ["L"] else "both" if words[0] == "L" else "tags"] += 1
        rest = [word for word in words if word != "L"]
        assert len(rest) <= 3
        assert len(set(rest)) == len(rest)
        tags.update(rest)
    for kind, share in (("label", 0.3), ("tags", 0.2), ("both", 0.5)):
        assert abs(kinds[kind] / 2000 - share) < 0.04
    assert set(tags) == {"a", "b", "c", "d"}
    assert max(tags.values()) < 1.2 * min(tags.values())


def test_a_label_without_tags_stands_alone_and_tags_without_a_label_are_dropped() -> None:
    rule = LabelAndTagsCaption("label_and_tags", label_only=0.0, tags_only=1.0)
    assert caption({"json": b'{"label": "L"}'}, rule) == "L"
    assert caption({"json": b'{"label": "L", "tags": []}'}, rule) == "L"
    decoder = Decoder(4, NoAugment("none"), rule)
    assert reason({"json": b'{"tags": ["a"]}'}, decoder) == "no_caption"
    assert reason({"json": b'{"label": " ", "tags": null}'}, decoder) == "empty_caption"
    assert reason({}, decoder) == "no_caption"


def test_a_decoder_is_read_only_and_small_to_send(tmp_path: Path) -> None:
    (tmp_path / "decoder").write_bytes(pickle.dumps(PLAIN))
    assert (tmp_path / "decoder").stat().st_size < 1000
