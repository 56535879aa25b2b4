"""attnflow: from a Transformer's attention weights to token attention, by raw attention, attention rollout and attention flow.

>>> import attnflow as af
>>> attention = af.Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"])
>>> af.rollout(attention).at(position=0)
array([0.6875, 0.3125])
"""

from attnflow.attention import Attention
from attnflow.capture import capture
from attnflow.corpus import explain_corpus
from attnflow.corpus_table import read_corpus
from attnflow.errors import (
    AttnFlowError,
    CaptureError,
    FileError,
    MissingExtraError,
    OptionError,
    RoundingWarning,
    SaturationWarning,
    ShareWarning,
    WeightsError,
)
from attnflow.evaluate import Report, evaluate
from attnflow.explain import Explanation, explain
from attnflow.generation import Generation, PromptAttention, generate
from attnflow.graph import AttentionGraph
from attnflow.groups import Group
from attnflow.importance import Importance, blank_out, input_gradient
from attnflow.loading import load
from attnflow.methods import METHODS, flow, max_flow, raw, rollout
from attnflow.models import Model
from attnflow.record import record
from attnflow.results import MaxFlow, TokenAttention

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "Attention",
    "AttentionGraph",
    "AttnFlowError",
    "CaptureError",
    "Explanation",
    "FileError",
    "Generation",
    "Group",
    "Importance",
    "MaxFlow",
    "MissingExtraError",
    "Model",
    "OptionError",
    "PromptAttention",
    "Report",
    "RoundingWarning",
    "SaturationWarning",
    "ShareWarning",
    "TokenAttention",
    "WeightsError",
    "blank_out",
    "capture",
    "evaluate",
    "explain",
    "explain_corpus",
    "flow",
    "generate",
    "input_gradient",
    "load",
    "max_flow",
    "raw",
    "read_corpus",
    "record",
    "rollout",
]
