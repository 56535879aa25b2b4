"""What the pages of a corpus know: the list of its texts, and each text with all its results."""

from collections.abc import Iterable

import numpy as np

from attnflow.analysis.page import schema
from attnflow.core.text import show_token
from attnflow.corpus.stored_texts import StoredRow, StoredText
from attnflow.errors import printable

SCALE = (
    "Blue: more than even attention would give, up to 8 times; orange: less, down to an eighth;"
    " importance in blue by its size. Special tokens, and tokens that hold more than half of a row,"
    " are not coloured."
)


def describe_texts(
    texts: Iterable[StoredText],
    pages: Iterable[str],
    name: str,
    layer: int | None,
    title: str,
    notes: Iterable[str] = (),
) -> schema.Strips:
    """The list of the texts of a corpus: sortable, each a strip that opens its page.

    name, layer: the result that the strips show. pages: the addresses of the texts' pages.
    """
    entries = []
    for text, page in zip(texts, pages, strict=True):
        strip = next(each for each in text.strips if (each.name, each.layer) == (name, layer))
        told = (text.label, text.prediction, text.probability, strip.top, strip.share)
        cells = (printable(text.id), "".join(text.tokens), *told)
        entries.append(schema.Entry(page=page, cells=cells, strip=describe_strip(text, strip)))
    return schema.Strips(
        kind="corpus",
        title=printable(title),
        kicker="attnflow: the texts of a corpus",
        caption=f"Coloured by {name_strip(name, layer)}. {SCALE}",
        notes=tuple(map(printable, notes)),
        columns=("id", "text", "label", "prediction", "probability", "top", "share"),
        entries=tuple(entries),
    )


def describe_text(text: StoredText, index: str) -> schema.Strips:
    """One text of a corpus: a strip per result and layer. index: the address of the list."""
    entries = []
    for strip in text.strips:
        cells = (name_strip(strip.name, strip.layer), "", strip.top, strip.share)
        entries.append(schema.Entry(page=None, cells=cells, strip=describe_strip(text, strip)))
    told = "" if text.prediction is None else show_token(text.prediction)
    chance = "" if text.probability is None else f" {text.probability:.2f}"
    return schema.Strips(
        kind="corpus",
        title=f"{told}{chance}" or printable(text.id),
        kicker=printable(text.id),
        back=index,
        caption=SCALE,
        notes=(),
        columns=("result", "text", "top", "share"),
        entries=tuple(entries),
    )


def name_strip(name: str, layer: int | None) -> str:
    """A result and its layer."""
    return printable(name) + ("" if layer is None else f", layer {layer}")


def describe_strip(text: StoredText, strip: StoredRow) -> schema.PageStrip:
    """The colours of a text by one result."""
    return schema.PageStrip(
        words=text.tokens,
        spaces=tuple(map(int, text.starts)),
        tones=tuple(None if np.isnan(tone) else round(float(tone), 3) for tone in strip.tones),
    )
