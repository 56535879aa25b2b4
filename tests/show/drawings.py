"""What a drawing shows: its texts, its title, the light of its colours; and names that try to break one."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from attnflow.show import colours

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "$x^2$",
    "$\\frac{",
    "_",
    "\"quoted' & <b>",
    "\U0001f600\U0001f984",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u4e2d\u6587",
    "one\ntwo\ttabs",
    "\u200b",
    "\u202eturned",
    "\ud800",
    "\x00",
    "",
    "  ",
    "x" * 10_000,
)


def read_texts(path: Path) -> str:
    """All text of an SVG file, which must be XML."""
    nodes = ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")
    return "\n".join("".join(node.itertext()) for node in nodes)


def light(colour: str) -> float:
    """The luminance of a colour, from 0 to 1."""
    channels = np.array(to_rgb(colour))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    found = float(linear @ [0.2126, 0.7152, 0.0722])
    assert colours.measure_light(to_hex(colour)) == pytest.approx(found, abs=2e-3)
    return found


def title_of(ax: Any) -> str:
    return " ".join(ax.get_title().split())
