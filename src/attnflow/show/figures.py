"""The figures, in matplotlib: they take results, compute nothing, and return what they drew.

Each takes `ax` (or `axes`, where it has several panels), or makes a figure of its own, and returns
a `Drawing` with `.figure`, `.axes`, `.artists` and `.save("name.png")`, also .svg and .pdf. No
figure is left behind, and no setting of matplotlib is changed. Higher layers stand higher in every
figure, or further right where that is asked for.
"""

from attnflow.show.drawing import Drawing, save
from attnflow.show.figure_bars import bars
from attnflow.show.figure_curves import layer_curves
from attnflow.show.figure_edges import edges
from attnflow.show.figure_faithfulness import deletion_curves
from attnflow.show.figure_generation import compare_generations, generation
from attnflow.show.figure_graphs import attention_graph, compare_graphs
from attnflow.show.figure_maps import compare_heatmaps, heatmap
from attnflow.show.figure_overlay import compare_overlays, overlay
from attnflow.show.figure_paths import flow_paths
from attnflow.show.figure_pronoun import pronoun
from attnflow.show.figure_text import text

__all__ = [
    "Drawing",
    "attention_graph",
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
    "layer_curves",
    "overlay",
    "pronoun",
    "save",
    "text",
]
