"""The public names, and where each is defined; `__init__.py` imports one when it is used."""

from . import figures as figures
from .analysis.evaluate.evaluate import evaluate
from .analysis.evaluate.report import Report
from .analysis.evaluate.truth.truth_prompts import TruthPrompt, TruthPrompts, truth_prompts
from .analysis.evaluate.truth.truth_report import TruthReport
from .analysis.explain.compare import SideBySide, compare
from .analysis.explain.explain import explain, explain_events
from .analysis.explain.explanation import Explanation
from .analysis.faithfulness.faithfulness import faithfulness
from .analysis.faithfulness.metrics import PerturbationCurve
from .analysis.faithfulness.plausibility import plausibility
from .analysis.generate.generate import generate
from .analysis.generate.generation import Generation
from .analysis.generate.prompt_attention import PromptAttention
from .analysis.generate.replay import replay
from .analysis.importance.blank_out import blank_out
from .analysis.importance.importance import Importance
from .analysis.importance.input_gradient import input_gradient
from .analysis.importance.relevance import relevance
from .analysis.intervene.change import Change
from .analysis.intervene.intervene import intervene
from .analysis.intervene.intervention import Intervention
from .analysis.run import (
    Event,
    GraphMade,
    ImportanceReady,
    InputDone,
    InputEncoded,
    MethodRun,
    Predicted,
    ResultReady,
    StageStarted,
)
from .capturing.backward_rule import BACKWARD_RULES, BackwardRule, ModuleCall
from .capturing.capture import capture
from .capturing.mix import LayerMix
from .capturing.record.record import record
from .core.attention import Attention
from .core.choices import token_attention
from .core.comparison import Comparison
from .core.flow.max_flow import MaxFlow
from .core.graph import AttentionGraph
from .core.groups import Group
from .core.methods import METHODS, flow, max_flow, raw, rollout
from .core.provenance import Source
from .core.results import TokenAttention
from .core.sinks import Sink, sinks
from .corpus.explain_corpus import explain_corpus
from .corpus.read_corpus import read_corpus
from .edges.edge_weight import EDGES, EdgeWeight, edge_weight
from .edges.graphs import attention_graph, capture_mix
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
    TargetWarning,
    WeightsError,
)
from .models.load import load
from .models.model import Model
from .models.planted.planted import PLANTED, Planted, planted
from .models.predict import RUNNER_UP, Prediction
from .progress import Progress, progress_listener
from .rows.rows import raw_rows, rollout_rows
from .rows.segments import rollout_segments

__all__ = [
    "BACKWARD_RULES",
    "EDGES",
    "METHODS",
    "PLANTED",
    "RUNNER_UP",
    "Attention",
    "AttentionGraph",
    "AttnFlowError",
    "BackwardRule",
    "CaptureError",
    "Change",
    "Comparison",
    "CorpusWarning",
    "EdgeWeight",
    "Event",
    "Explanation",
    "FileError",
    "Generation",
    "GraphMade",
    "Group",
    "Importance",
    "ImportanceReady",
    "InputDone",
    "InputEncoded",
    "Intervention",
    "LayerMix",
    "MaxFlow",
    "MethodRun",
    "MissingExtraError",
    "Model",
    "ModuleCall",
    "OptionError",
    "PerturbationCurve",
    "Planted",
    "Predicted",
    "Prediction",
    "Progress",
    "PromptAttention",
    "Report",
    "ResultReady",
    "RoundingWarning",
    "SaturationWarning",
    "ShareWarning",
    "SideBySide",
    "Sink",
    "Source",
    "StageStarted",
    "TargetWarning",
    "TokenAttention",
    "TruthPrompt",
    "TruthPrompts",
    "TruthReport",
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
    "explain_events",
    "faithfulness",
    "flow",
    "generate",
    "input_gradient",
    "intervene",
    "load",
    "max_flow",
    "planted",
    "plausibility",
    "progress_listener",
    "raw",
    "raw_rows",
    "read_corpus",
    "record",
    "relevance",
    "replay",
    "rollout",
    "rollout_rows",
    "rollout_segments",
    "sinks",
    "token_attention",
    "truth_prompts",
]

__version__: str
