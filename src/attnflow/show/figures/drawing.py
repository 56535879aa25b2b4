"""The base of all figures: matplotlib's settings, the `Drawing` they return, files, checks."""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.arrays import Floats
from attnflow.core.io.files import PICTURES, Writer, write_by_ending
from attnflow.core.provenance import Source, list_versions
from attnflow.core.results import TokenAttention
from attnflow.errors import MissingExtraError, OptionError, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = 8.0  # points
DPI = 200
METHOD_TITLES = {"raw": "raw attention", "rollout": "attention rollout", "flow": "attention flow"}
STYLE: Any = {
    "font.size": FONT,
    "axes.titlesize": FONT + 1,
    "axes.labelsize": FONT,
    "xtick.labelsize": FONT,
    "ytick.labelsize": FONT,
    "legend.fontsize": FONT,
    "figure.titlesize": FONT + 1,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "text.usetex": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "attnflow",  # the same figure gives the same file
    "pdf.fonttype": 42,
}


@contextmanager
def use_style() -> Iterator[None]:
    """Apply attnflow's matplotlib settings during one drawing; also a decorator."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError(
            "figures need matplotlib: pip install 'attnflow[figures]'"
        ) from error
    with matplotlib.rc_context(STYLE):
        yield


@dataclass(frozen=True, eq=False)
class Drawing:
    """What was drawn; a notebook shows it.

    Parameters
    ----------
    figure
        The whole matplotlib figure.
    axes
        The axes drawn into, one per panel.
    artists
        The artists that hold the data, by name.
    source
        Where the data came from, also in the metadata of saved files; None if unknown.
    latex
        The same as source for LaTeX, of `figures.text`; None of other figures.

    >>> from attnflow import figures, raw
    >>> drawn = figures.heatmap(raw([[[0.5, 0.5], [1.0, 0.0]]]))
    >>> drawn
    <Drawing: map, bar>
    >>> drawn.save("map.svg").name
    'map.svg'
    """

    figure: "Figure"
    axes: tuple["Axes", ...]
    artists: dict[str, Any]
    source: str | None = None
    latex: str | None = None

    def to_latex(self) -> str:
        """The source for LaTeX that `figures.text` gives; other figures are drawings only."""
        if self.latex is None:
            raise OptionError(
                "this figure has no source for LaTeX, which figures.text gives; save it as .pdf"
            )
        return self.latex

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .png, .svg or .pdf, by the ending of the name; of `figures.text` also .tex.

        Parameters
        ----------
        path
            The file to write.
        """
        return save(self, path)

    def _repr_png_(self) -> bytes:
        file = BytesIO()
        _write("png", self.figure, self.source, file)
        return file.getvalue()

    def __repr__(self) -> str:
        return f"<Drawing: {', '.join(self.artists)}>"


@use_style()
def save(figure: "Figure | Drawing", path: str | os.PathLike[str]) -> Path:
    """Write a figure as .png, .svg or .pdf, by the ending of the name.

    The same data drawn again gives the same bytes. The `source` of a `Drawing` is written to the
    metadata of the file.

    Parameters
    ----------
    figure
        A `Drawing`, or a matplotlib figure.
    path
        The file to write.

    >>> from matplotlib.figure import Figure
    >>> save(Figure(), "empty.svg").name
    'empty.svg'
    """
    drawn = figure if isinstance(figure, Drawing) else Drawing(figure, (), {})
    if not hasattr(drawn.figure, "savefig"):
        raise OptionError(
            f"save takes a figure or what a drawing returned; got {type(figure).__name__}"
        )
    writers: dict[str, Writer] = {
        ending: partial(_write, ending[1:], drawn.figure, drawn.source) for ending in PICTURES
    }
    if drawn.latex is not None:
        source = drawn.latex.encode(errors="backslashreplace")
        writers[".tex"] = lambda file: file.write(source)
    return write_by_ending(path, writers)


@use_style()
def _write(ending: str, figure: "Figure", source: str | None, file: IO[bytes]) -> None:
    metadata = describe_file(ending, figure, source)
    # a layout starts from the positions of axes: they are restored, or a second file would differ
    before = [(ax, ax.get_position(original=True), ax.get_in_layout()) for ax in figure.axes]
    try:
        figure.savefig(file, format=ending, dpi=DPI, metadata=metadata)
    finally:
        for ax, place, in_layout in before:
            ax.set_position(place)
            ax.set_in_layout(in_layout)  # set_position takes axes out of the layout


def describe_file(ending: str, figure: "Figure", source: str | None) -> dict[str, str | None]:
    """The metadata of a file: its content and source if known, and never a date."""
    import matplotlib

    undated: dict[str, dict[str, str | None]] = {
        "svg": {"Date": None},
        "pdf": {"CreationDate": None},
    }
    metadata = undated.get(ending, {})
    if source is None:
        return metadata
    source = printable(source)
    titles = [" ".join(ax.get_title().split()) for ax in figure.axes]
    title = printable(", ".join(dict.fromkeys(text for text in titles if text)))
    software = f"attnflow {list_versions()['attnflow']}, matplotlib {matplotlib.__version__}"
    about = f"{title}; from {source}" if title else f"from {source}"
    if ending == "pdf":
        named = {"Title": title, "Subject": about, "Keywords": source, "Creator": software}
    else:
        named = {"Title": title, "Description": about, "Source": source}
        named["Software" if ending == "png" else "Creator"] = software
    return {**metadata, **named}


def describe_sources(results: Iterable[object]) -> str | None:
    """The sources of results without duplicates; None if all are unknown."""
    # the source of a maximum flow is a node, and its provenance has that name
    kept = (getattr(result, name, None) for result in results for name in ("source", "provenance"))
    return "; ".join(dict.fromkeys(str(one) for one in kept if isinstance(one, Source))) or None


# ---- checks -------------------------------------------------------------------------------------


def check_drawable(result: TokenAttention) -> None:
    """Refuse anything but a `TokenAttention` with values of the expected shape."""
    if not isinstance(result, TokenAttention):
        raise OptionError(
            "this figure draws a TokenAttention, which raw, rollout and flow give;"
            f" got {describe_given(result)}"
        )
    expected = (len(result.layers), len(result.positions), len(result.tokens))
    meaning = f"{expected[0]} layers, {expected[1]} positions and {expected[2]} tokens"
    check_shape("values [layer, query, key]", result.values, expected, meaning)


def describe_given(given: object) -> str:
    """What was given instead of a result, and which part of it is one."""
    held = ": give one of its results, such as .rollout" if isinstance(given, Explanation) else ""
    return f"{type(given).__name__}{held}"


def check_shape(what: str, values: Floats, expected: tuple[int, ...], meaning: str) -> None:
    """Refuse values of an unexpected shape, or that are not finite."""
    if np.shape(values) != expected:
        raise OptionError(
            f"{what} must have shape {expected}, for {meaning}; got {np.shape(values)}:"
            " tokens and values belong to another"
        )
    if not np.isfinite(values).all():
        raise OptionError(f"{what} must be finite to be drawn; some are not")


def check_explanations(given: object) -> list[Explanation]:
    """One explanation or several, as a list; all with the same methods."""
    listed: Sequence[object] = [given]
    if isinstance(given, Sequence):
        listed = given
    several = [one for one in listed if isinstance(one, Explanation)]
    if not several or len(several) < len(listed):
        raise OptionError(
            f"this figure draws what explain gives, one or a list; got {type(given).__name__}"
        )
    names = [list(one.results) for one in several]
    if not names[0] or any(other != names[0] for other in names):
        listed = "; ".join(", ".join(map(str, other)) or "none" for other in names)
        raise OptionError(
            "explanations that are drawn together must hold the same methods, at least one;"
            f" got {listed}: explain them with the same methods="
        )
    for one in several:
        for name, result in one.results.items():
            check_drawable(result)
            if len(result.tokens) != len(one.tokens):
                raise OptionError(
                    f"an explanation's results must have its {len(one.tokens)} tokens;"
                    f" {name} has {len(result.tokens)}"
                )
    return several


def check_scale(scale: float | None, *values: Floats) -> float:
    """The value of the darkest colour, or of the widest edge; the largest value if None."""
    if scale is None:
        return find_largest(values)
    numeric = isinstance(scale, int | float | np.number) and not isinstance(scale, bool)
    if not numeric or not 0 < scale < float("inf"):
        raise OptionError(
            f"scale must be a number above 0, the value of the darkest colour; got {scale!r}"
        )
    return float(scale)


def find_largest(arrays: Iterable[Floats]) -> float:
    """The largest of all values; 1 if all are zero."""
    return max((float(array.max()) for array in arrays if array.size), default=0.0) or 1.0


def has_token_keys(result: TokenAttention) -> bool:
    """Whether keys are positions, and not words."""
    size = len(result.tokens)
    return all(
        position < size and result.tokens[position] == name
        for position, name in zip(result.positions, result.queries, strict=True)
    )
