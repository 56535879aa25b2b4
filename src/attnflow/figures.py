"""Figures of results, in matplotlib.

Each function draws into `ax` (or `axes`, if it has several panels) or a new figure, and returns a
`Drawing` with `.figure`, `.axes`, `.artists` and `.save("name.png")`, also .svg and .pdf. No figure
stays open, and no setting of matplotlib is changed. Higher layers stand higher in every figure, or
optionally further right.
"""

import warnings
from collections.abc import Callable

from attnflow.show.figures.bars import bars
from attnflow.show.figures.curves import layer_curves
from attnflow.show.figures.deletion_curves import deletion_curves
from attnflow.show.figures.drawing import Drawing, save
from attnflow.show.figures.edges import edges
from attnflow.show.figures.flow_paths import flow_paths
from attnflow.show.figures.generation import compare_generations, generation
from attnflow.show.figures.heatmap import compare_heatmaps, heatmap
from attnflow.show.figures.intervention import intervention
from attnflow.show.figures.layered_graph import compare_graphs, layered_graph
from attnflow.show.figures.overlay import compare_overlays, overlay
from attnflow.show.figures.pronoun import pronoun
from attnflow.show.figures.text import text

__all__ = [
    "Drawing",
    "bars",
    "compare_generations",
    "compare_graphs",
    "compare_heatmaps",
    "compare_overlays",
    "deletion_curves",
    "edges",
    "flow_paths",
    "generation",
    "heatmap",
    "intervention",
    "layer_curves",
    "layered_graph",
    "overlay",
    "pronoun",
    "save",
    "text",
]


def __getattr__(name: str) -> Callable[..., Drawing]:
    """Deprecated names."""
    if name != "attention_graph":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "figures.attention_graph is now figures.layered_graph; the old name works in this version"
        " only",
        FutureWarning,
        stacklevel=2,
    )
    return layered_graph
