"""The picture that a vision model saw, as the page shows it under its grid of patches."""

import base64
import io
from collections.abc import Sequence

import numpy as np

from attnflow.analysis.page.schema import PagePicture
from attnflow.core.arrays import Floats
from attnflow.core.text import find_patches

PIXELS = 512  # the longer side of the picture in a page
PATCH_PIXELS = 32  # pixels of a patch without a picture


def describe_picture(pixels: Floats | None, tokens: Sequence[str]) -> PagePicture | None:
    """The grid of patches and the picture; None without patches.

    pixels: [height, width] or [height, width, 3], from 0 to 1.
    """
    places = find_patches(tokens)
    down, across = (max((place[axis] for place in places), default=0) + 1 for axis in (0, 1))
    if len(places) != down * across or len(places) < 2:
        return None
    source, width, height = None, PATCH_PIXELS * across, PATCH_PIXELS * down
    if pixels is not None:
        source, width, height = encode_picture(pixels)
    return PagePicture(
        down=down,
        across=across,
        patches=tuple(places[row, column] for row in range(down) for column in range(across)),
        source=source,
        width=width,
        height=height,
    )


def encode_picture(pixels: Floats) -> tuple[str, int, int]:
    """The data URL, width and height of a picture, in grey: colours are left to the numbers."""
    from PIL import Image

    picture = Image.fromarray((255 * pixels).round().astype(np.uint8)).convert("L")
    picture.thumbnail((PIXELS, PIXELS))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    content = base64.b64encode(file.getvalue()).decode()
    return f"data:image/jpeg;base64,{content}", picture.width, picture.height
