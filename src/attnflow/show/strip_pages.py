"""Pages of coloured strips: two explanations side by side, and the texts of a corpus."""

from collections.abc import Iterable

import numpy as np

from attnflow.analysis.side_by_side import Side, SideBySide
from attnflow.core.text import show_token
from attnflow.corpus.listing import StoredText, Strip
from attnflow.errors import printable
from attnflow.show.page import fill_template
from attnflow.show.page_data import COLOURS
from attnflow.show.page_methods import describe_prediction
from attnflow.show.page_packing import Data

RAMPS = {name: COLOURS[name] for name in ("light", "dark", "lightAgainst", "darkAgainst")}


def fill_strips(data: Data) -> str:
    """The page of these strips."""
    return fill_template(
        {"colours": RAMPS} | data, "strips.html", ("page.css", "strips.css"), ("strips",)
    )


def pair_page(pair: SideBySide) -> str:
    """The page of two explanations side by side, aligned, with the difference.

    >>> import attnflow as af
    >>> explanation = af.explain("the keys to the house")
    >>> pair_page(af.compare(explanation, methods=("rollout", "flow")))[:15]
    '<!doctype html>'
    """
    pairs, entries = [], []
    for _, token, value, _, other, other_value, difference in pair.rows():
        names = [None if name is None else show_token(name) for name in (token, other)]
        shown = " / ".join(dict.fromkeys(name for name in names if name is not None))
        pairs.append(
            {
                "left": names[0],
                "right": names[1],
                "values": [value, other_value],
                "difference": difference,
            }
        )
        entries.append({"page": None, "cells": [shown, value, other_value, difference]})
    sides = [describe_side(side) for side in (pair.left, pair.right)]
    left_out = [
        f"{side.left_out:.0%} of {name} on special tokens, sinks and the explained position is left"
        " out"
        for side, name in ((pair.left, "the upper row"), (pair.right, "the lower row"))
        if side.left_out >= 0.005
    ]
    caption = (
        f"Above: {tell_side(pair.left)}. Below: {tell_side(pair.right)}. Blue: its share, one scale"
        " for both. Bars: the lower row minus the upper one, blue for more, orange for less."
    )
    return fill_strips(
        {
            "kind": "pair",
            "title": pair.summary(),
            "kicker": printable(f"{pair.left.name} | {pair.right.name}"),
            "caption": " ".join([caption, *(f"{note}." for note in left_out)]),
            "notes": list(dict.fromkeys(map(str, (pair.source, pair.other_source)))),
            "unit": pair.unit,
            "sides": sides,
            "pairs": pairs,
            "columns": [pair.unit, sides[0]["name"], sides[1]["name"], "difference"],
            "entries": entries,
        }
    )


def describe_side(side: Side) -> Data:
    """One side for JSON."""
    return {
        "name": printable(side.name),
        "method": printable(side.method),
        "layer": side.layer,
        "model": printable(side.explanation.model),
        "prediction": describe_prediction(side.explanation.prediction),
        "leftOut": side.left_out,
    }


def tell_side(side: Side) -> str:
    """What a side shows, in a few words."""
    model = f" of {side.explanation.model}" if side.explanation.model else ""
    return printable(f"{side.name} ({side.method}{model}, layer {side.layer})")


def corpus_index(
    texts: Iterable[StoredText],
    pages: Iterable[str],
    name: str,
    layer: int | None,
    title: str,
    notes: Iterable[str] = (),
) -> str:
    """The page that lists the texts of a corpus: sortable, each a strip that opens its page.

    name, layer: the result that the strips show. pages: the addresses of the texts' pages.
    """
    entries = []
    for text, page in zip(texts, pages, strict=True):
        strip = next(each for each in text.strips if (each.name, each.layer) == (name, layer))
        numbers = [text.probability, strip.share]
        cells = [text.label, text.prediction, numbers[0], strip.top, numbers[1]]
        cells = [printable(text.id), "".join(text.tokens), *cells]
        entries.append({"page": page, **describe_strip(text, strip), "cells": cells})
    where = "" if layer is None else f", layer {layer}"
    return fill_strips(
        {
            "kind": "corpus",
            "title": printable(title),
            "kicker": "attnflow: the texts of a corpus",
            "caption": f"Coloured by {printable(name)}{where}. {SCALE}",
            "notes": [printable(note) for note in notes],
            "columns": ["id", "text", "label", "prediction", "probability", "top", "share"],
            "entries": entries,
        }
    )


def stored_text_page(text: StoredText, index: str) -> str:
    """The page of one text of a corpus: a strip per result and layer. index: back to the list."""
    entries = []
    for strip in text.strips:
        where = "" if strip.layer is None else f", layer {strip.layer}"
        cells = [f"{printable(strip.name)}{where}", "", strip.top, strip.share]
        entries.append({"page": None, **describe_strip(text, strip), "cells": cells})
    told = "" if text.prediction is None else f"{show_token(text.prediction)}"
    chance = "" if text.probability is None else f" {text.probability:.2f}"
    return fill_strips(
        {
            "kind": "corpus",
            "title": f"{told}{chance}" or printable(text.id),
            "kicker": printable(text.id),
            "back": index,
            "caption": SCALE,
            "notes": [],
            "columns": ["result", "text", "top", "share"],
            "entries": entries,
        }
    )


SCALE = (
    "Blue: more than even attention would give, up to 8 times; orange: less, down to an eighth;"
    " importance in blue by its size. Special tokens, and tokens that hold more than half of a row,"
    " are not coloured."
)


def describe_strip(text: StoredText, strip: Strip) -> Data:
    """A strip for JSON."""
    return {
        "words": list(text.tokens),
        "spaces": [int(start) for start in text.starts],
        "tones": [None if np.isnan(tone) else round(float(tone), 3) for tone in strip.tones],
    }
