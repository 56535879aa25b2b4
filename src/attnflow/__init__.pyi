"""The public names, and where each is defined; `__init__.py` imports one when it is used."""

from . import figures as figures
from .analysis.evaluation import evaluate
from .analysis.explaining import explain
from .analysis.explanation import Explanation
from .analysis.generating import generate
from .analysis.generation import Generation
from .analysis.importance import Importance, blank_out, input_gradient
from .analysis.measuring import faithfulness
from .analysis.metrics import PerturbationCurve
from .analysis.prompt_attention import PromptAttention
from .analysis.rationales import plausibility
from .analysis.report import Report
from .analysis.side_by_side import SideBySide, compare
from .capturing.assembly import capture
from .capturing.mixing import LayerMix
from .capturing.recording import record
from .capturing.segments import rollout_segments
from .core.attention import Attention
from .core.comparison import Comparison
from .core.custom import token_attention
from .core.graph import AttentionGraph
from .core.groups import Group
from .core.methods import METHODS, flow, max_flow, raw, rollout
from .core.provenance import Source
from .core.results import TokenAttention
from .core.single_flow import MaxFlow
from .core.sink_tokens import Sink, sinks
from .corpus.reading import read_corpus
from .corpus.running import explain_corpus
from .edges.building import attention_graph, capture_mix
from .edges.choosing import EDGES, EdgeWeight, edge_weight
from .edges.rows import raw_rows, rollout_rows
from .errors import (
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
from .models.loading import load
from .models.model import Model
from .models.planting import PLANTED, Planted, planted

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

__version__: str
