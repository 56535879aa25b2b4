"""attnflow: from a Transformer's attention weights to token attention, by raw attention, attention rollout and attention flow.

>>> import attnflow as af
>>> attention = af.Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"])
>>> af.rollout(attention).at(position=0)
array([0.6875, 0.3125])
"""

from attnflow.attention import Attention
from attnflow.errors import AttnFlowError, FileError, MissingExtraError, OptionError, SaturationWarning, WeightsError
from attnflow.graph import AttentionGraph
from attnflow.methods import METHODS, flow, max_flow, raw, rollout
from attnflow.results import MaxFlow, TokenAttention

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Attention",
    "AttentionGraph",
    "AttnFlowError",
    "FileError",
    "MaxFlow",
    "MissingExtraError",
    "OptionError",
    "SaturationWarning",
    "TokenAttention",
    "WeightsError",
    "flow",
    "max_flow",
    "raw",
    "rollout",
]
