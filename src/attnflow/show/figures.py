"""The figures, in matplotlib: they take results, compute nothing, and return what they drew.

Each takes `ax` (or `axes`, where it has several panels), or makes a figure of its own, and returns
a `Drawing` with `.figure`, `.axes`, `.artists` and `.save("name.png")`, also .svg and .pdf. No
figure is left behind, and no setting of matplotlib is changed.
"""

from attnflow.show.drawing import Drawing, save
from attnflow.show.figure_curves import layer_curves
from attnflow.show.figure_edges import edges
from attnflow.show.figure_faithfulness import deletion_curves
from attnflow.show.figure_graphs import attention_graph, compare_graphs, flow_paths
from attnflow.show.figure_maps import compare_heatmaps, generation, heatmap
from attnflow.show.figure_overlay import overlay
from attnflow.show.figure_pronoun import pronoun

__all__ = [
    "Drawing",
    "attention_graph",
    "compare_graphs",
    "compare_heatmaps",
    "deletion_curves",
    "edges",
    "flow_paths",
    "generation",
    "heatmap",
    "layer_curves",
    "overlay",
    "pronoun",
    "save",
]
