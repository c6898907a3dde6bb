"""From a sample's bytes to a square uint8 RGB image and a caption, or to the reason why it is dropped.

A picture arrives as people see it: turned by its EXIF orientation, transparency on white, 16-bit grey scaled to 8.
Broken files are dropped, never repaired: Pillow's LOAD_TRUNCATED_IMAGES stays off, as it paints what is missing grey.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image
from PIL.Image import Transpose
from torch import Tensor

from clipscale.config.data import Augment, Caption
from clipscale.data.assign import sample_rng
from clipscale.data.augment import augment, least_side
from clipscale.data.captions import Unusable, read_caption

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "jfif")
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # no more: Pillow would start Ghostscript for an EPS
_ORIENTATION = 0x0112
_TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Decoder:
    """Members of a sample -> image and caption. Pickles; equal arguments give equal results in any process.

    size: side of the square image. caption: None where no caption is wanted. max_pixels: larger images are dropped
    unread. draft: let the JPEG decoder itself shrink images that are at least twice as large as needed; fast, but a
    little different from a full decode, so evaluation leaves it off.
    """

    size: int
    augment: Augment
    caption: Caption | None
    seed: int = 0
    max_pixels: int = 100_000_000
    draft: bool = False

    def __call__(
        self, members: Mapping[str, bytes], *, epoch: int = 0, sample: int = 0
    ) -> tuple[UInt8[Tensor, "3 size size"], str]:
        """The image and the caption; random choices depend on (seed, epoch, sample) only.

        Raises `Unusable`: no_image, too_large, decode_error, or a reason of `read_caption`.
        """
        rng = sample_rng(self.seed, epoch, sample)
        caption = read_caption(members, self.caption, rng) if self.caption else ""
        draft_side = least_side(self.augment, self.size) if self.draft else None
        image = read_image(image_bytes(members), self.max_pixels, draft_side)
        pixels = np.array(augment(image, self.augment, self.size, rng))
        return torch.from_numpy(pixels).permute(2, 0, 1), caption  # [H, W, 3] -> [3, H, W]


def image_bytes(members: Mapping[str, bytes]) -> bytes:
    """The member that is the image. Raises `Unusable`: no_image."""
    extension = next((extension for extension in IMAGE_EXTENSIONS if extension in members), None)
    if extension is None:
        raise Unusable("no_image")
    return members[extension]


def read_image(data: bytes, max_pixels: int, draft_side: int | None = None) -> Image.Image:
    """An upright RGB image without transparency, of its full size; a JPEG may come smaller, no side below `draft_side`.

    Raises `Unusable`: too_large, decode_error.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > max_pixels:
            raise Unusable("too_large")
        if draft_side is not None:
            image.draft("RGB", (draft_side, draft_side))
        image.load()
        turn = _turn(image)  # after the load: Pillow turns a TIFF itself, and a PNG may tell at its end
        return _on_white(image if turn is None else image.transpose(turn))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Unusable("too_large") from None
    except Unusable:
        raise
    except Exception:  # noqa: BLE001 - on hostile bytes decoders raise whatever they like
        raise Unusable("decode_error") from None


def _turn(image: Image.Image) -> Transpose | None:
    try:
        return _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - as above, but broken EXIF is no reason to lose the image
        return None


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        grey = np.asarray(image)
        if grey.max(initial=0) > 0xFFFF:
            raise ValueError("grey values of more than 16 bits")
        return Image.fromarray(np.rint(grey.clip(0) / 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("no telling which values are black and white")
    if image.has_transparency_data:
        if image.mode == "La":
            image = image.convert("LA")
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")  # RGB itself comes back as a copy of a few microseconds
