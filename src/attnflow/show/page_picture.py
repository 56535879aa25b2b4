"""The picture that a vision model saw, as the page shows it under its grid of patches."""

import base64
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from attnflow.errors import printable
from attnflow.show.page_packing import Data

PATCH = re.compile(r"(\d+),(\d+)")  # the names of patches: row and column
PIXELS = 512  # the longer side of the picture in a page


def describe_picture(value: Any, tokens: Sequence[str]) -> tuple[Data | None, list[str]]:
    """The grid of patches with the picture, if it can be had; None without patches; and notes."""
    places = {
        (int(match[1]), int(match[2])): key
        for key, token in enumerate(tokens)
        if (match := PATCH.fullmatch(token))
    }
    if not places:
        return None, []
    down, across = (max(place[axis] for place in places) + 1 for axis in (0, 1))
    if len(places) != down * across or down * across < 2:
        return None, []
    patches = [places[row, column] for row in range(down) for column in range(across)]
    data: Data = {"down": down, "across": across, "patches": patches}
    try:
        picture = read_picture(value)
    except (OSError, ValueError, TypeError) as error:
        line = " ".join(str(error).split())[:200]
        data |= {"source": None, "width": 32 * across, "height": 32 * down}
        return data, [printable(f"The picture cannot be shown, so its grid stands alone: {line}")]
    file = io.BytesIO()
    picture = picture.convert("L")  # grey: the only hue is that of the numbers
    picture.thumbnail((PIXELS, PIXELS))
    picture.save(file, "JPEG", quality=85)
    content = base64.b64encode(file.getvalue()).decode()
    source = f"data:image/jpeg;base64,{content}"
    return data | {"source": source, "width": picture.width, "height": picture.height}, []


def read_picture(value: Any) -> Any:
    """A PIL image of what the model was given: an image, an array or tensor, or a file."""
    from PIL import Image

    if isinstance(value, Image.Image):
        return value.convert("RGB")
    if isinstance(value, str | os.PathLike):
        path = Path(value)
        if not path.exists():
            raise OSError(f"the file {str(path)!r} is not there any more")
        return Image.open(path).convert("RGB")
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, float)
    if array.ndim == 3 and array.shape[0] in (1, 3):  # [channel, height, width]
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3):
        raise ValueError(f"a picture has 2 or 3 axes; got shape {array.shape}")
    low, high = float(array.min()), float(array.max())
    if low < 0 or high > 255 or high <= 1:  # normalised for the model: back to visible colours
        array = (array - low) / ((high - low) or 1.0) * 255
    return Image.fromarray(array.astype(np.uint8)).convert("RGB")
