"""attnflow: which input tokens does a Transformer look at?

From attention weights to token attention, by raw attention, attention rollout and attention flow.

>>> import attnflow as af
>>> attention = af.Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"])
>>> af.rollout(attention).at(position=0)
array([0.6875, 0.3125])
"""

from attnflow.analysis.evaluation import evaluate
from attnflow.analysis.explaining import explain
from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generating import generate
from attnflow.analysis.generation import Generation
from attnflow.analysis.importance import Importance, blank_out, input_gradient
from attnflow.analysis.measuring import faithfulness
from attnflow.analysis.metrics import PerturbationCurve
from attnflow.analysis.prompt_attention import PromptAttention
from attnflow.analysis.rationales import plausibility
from attnflow.analysis.report import Report
from attnflow.analysis.side_by_side import SideBySide, compare
from attnflow.capturing.assembly import capture
from attnflow.capturing.mixing import LayerMix
from attnflow.capturing.recording import record
from attnflow.capturing.segments import rollout_segments
from attnflow.core.attention import Attention
from attnflow.core.comparison import Comparison
from attnflow.core.custom import token_attention
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group
from attnflow.core.methods import METHODS, flow, max_flow, raw, rollout
from attnflow.core.provenance import Source
from attnflow.core.results import TokenAttention
from attnflow.core.single_flow import MaxFlow
from attnflow.core.sink_tokens import Sink, sinks
from attnflow.corpus.reading import read_corpus
from attnflow.corpus.running import explain_corpus
from attnflow.edges.building import attention_graph, capture_mix
from attnflow.edges.choosing import EDGES, EdgeWeight, edge_weight
from attnflow.edges.rows import raw_rows, rollout_rows
from attnflow.errors import (
    AttnFlowError,
    CaptureError,
    CorpusWarning,
    FileError,
    MissingExtraError,
    OptionError,
    RoundingWarning,
    SaturationWarning,
    ShareWarning,
    WeightsError,
)
from attnflow.models.loading import load
from attnflow.models.model import Model
from attnflow.models.planting import PLANTED, Planted, planted

__version__ = "0.3.0"

__all__ = [
    "EDGES",
    "METHODS",
    "PLANTED",
    "Attention",
    "AttentionGraph",
    "AttnFlowError",
    "CaptureError",
    "Comparison",
    "CorpusWarning",
    "EdgeWeight",
    "Explanation",
    "FileError",
    "Generation",
    "Group",
    "Importance",
    "LayerMix",
    "MaxFlow",
    "MissingExtraError",
    "Model",
    "OptionError",
    "PerturbationCurve",
    "Planted",
    "PromptAttention",
    "Report",
    "RoundingWarning",
    "SaturationWarning",
    "ShareWarning",
    "SideBySide",
    "Sink",
    "Source",
    "TokenAttention",
    "WeightsError",
    "attention_graph",
    "blank_out",
    "capture",
    "capture_mix",
    "compare",
    "edge_weight",
    "evaluate",
    "explain",
    "explain_corpus",
    "faithfulness",
    "flow",
    "generate",
    "input_gradient",
    "load",
    "max_flow",
    "planted",
    "plausibility",
    "raw",
    "raw_rows",
    "read_corpus",
    "record",
    "rollout",
    "rollout_rows",
    "rollout_segments",
    "sinks",
    "token_attention",
]


def __dir__() -> list[str]:
    """The public names: where they are defined is nobody's business."""
    return sorted([*__all__, "__doc__", "__version__", "figures"])
