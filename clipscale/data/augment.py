"""From an RGB image of any size to a square one: as evaluation sees it, or with a random crop or a light affine change.

Each rule is one resampling of the source: nothing is blurred twice.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image
from PIL.Image import Resampling, Transpose

from clipscale.config.data import AffineAugment, Augment, CropAugment

_WHITE = (255, 255, 255)


def augment(image: Image.Image, rule: Augment, size: int, rng: np.random.Generator) -> Image.Image:
    """`image` (RGB) at size x size pixels by `rule`, its random choices drawn from `rng`."""
    if rule.kind == "crop":
        return _random_crop(image, rule, size, rng)
    if rule.kind == "affine":
        return _affine(image, rule, size, rng)
    return centre_crop(image, size)


def least_side(rule: Augment, size: int) -> int:
    """The shortest side that an image needs so that no rule enlarges what it keeps of it."""
    if rule.kind == "crop":
        return math.ceil(size / math.sqrt(min(1.0, rule.scale[0])))
    if rule.kind == "affine":
        return math.ceil(size * max(1.0, rule.scale[1]))
    return size


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Shortest side to `size`, then the centre: to the pixel what CLIP's own preprocessing gives (bicubic)."""
    short = min(image.size)
    width, height = (size if side == short else int(size * side / short) for side in image.size)
    if (width, height) != image.size:
        image = image.resize((width, height), Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image if width == height else image.crop((left, top, left + size, top + size))


def _random_crop(image: Image.Image, rule: CropAugment, size: int, rng: np.random.Generator) -> Image.Image:
    """A window of random area and aspect ratio, resized (Szegedy et al. 2015, as torchvision draws it)."""
    width, height = image.size
    aspect_low, aspect_high = math.log(rule.ratio[0]), math.log(rule.ratio[1])
    window_width, window_height = width, height
    for _ in range(10):
        area_share, aspect_share = rng.random(2)
        area = width * height * (rule.scale[0] + area_share * (rule.scale[1] - rule.scale[0]))
        aspect = math.exp(aspect_low + aspect_share * (aspect_high - aspect_low))
        window_width, window_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < window_width <= width and 0 < window_height <= height:
            break
    else:  # no such window fits: the largest one of a permitted aspect
        window_width = min(width, max(1, round(height * rule.ratio[1])))
        window_height = min(height, max(1, round(width / rule.ratio[0])))
    across, down, flip = rng.random(3)
    left, top = int(across * (width - window_width + 1)), int(down * (height - window_height + 1))
    box = (left, top, left + window_width, top + window_height)
    image = image.resize((size, size), Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return image.transpose(Transpose.FLIP_LEFT_RIGHT) if flip < rule.flip else image


def _affine(image: Image.Image, rule: AffineAugment, size: int, rng: np.random.Generator) -> Image.Image:
    """Shortest side fitted to `size`, turned, zoomed and shifted about the centre, white where nothing is left."""
    turn, zoom, across, down, flip = rng.random(5)
    angle = math.radians((2 * turn - 1) * rule.degrees)
    zoom = rule.scale[0] + zoom * (rule.scale[1] - rule.scale[0])
    pixels = min(image.size) / size / zoom  # of the source, per pixel of the target
    centre_x, centre_y = image.width / 2, image.height / 2
    if pixels > 1.5:  # the transform looks at 4 x 4 source pixels only: average first what it would skip
        factor = round(pixels)
        image = image.reduce(factor)
        pixels, centre_x, centre_y = pixels / factor, centre_x / factor, centre_y / factor
    cos, sin = pixels * math.cos(angle), pixels * math.sin(angle)
    sign = -1 if flip < rule.flip else 1
    # Target point -> source point: centre to centre, through the shift and the matrix.
    x = size / 2 + (2 * across - 1) * rule.translate * size
    y = size / 2 + (2 * down - 1) * rule.translate * size
    matrix = (
        sign * cos, sin, centre_x - sign * cos * x - sin * y,
        -sign * sin, cos, centre_y + sign * sin * x - cos * y,
    )  # fmt: skip
    return image.transform((size, size), Image.Transform.AFFINE, matrix, Resampling.BICUBIC, fillcolor=_WHITE)
