"""`attention_graph`: a model and an input in, a graph of any edges out.

One forward pass gives the edges of all weights that were asked for, layer by layer; those that need
the gradient of a target take one more, with its backward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from attnflow.capturing.assembly import check_mixers, run_batch
from attnflow.capturing.mixing import LayerMix, Pending, follow_layers, make_mix
from attnflow.core.attention import Attention
from attnflow.core.graph import AttentionGraph, Floats
from attnflow.core.provenance import Source
from attnflow.edges.choosing import EdgeWeight, read_edges
from attnflow.errors import CaptureError, OptionError
from attnflow.models.execution import evaluating, running
from attnflow.models.families import name_part
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model
from attnflow.models.probing import make_probe_inputs
from attnflow.models.wiring import Wiring, find_wirings

if TYPE_CHECKING:
    import torch

WIRINGS: "WeakKeyDictionary[Any, list[Wiring]]" = WeakKeyDictionary()


def trace_model(model: Model) -> list[Wiring]:
    """How each attention of a model stands in its block; traced once."""
    if model.model not in WIRINGS:
        if not model.probe.interface:
            raise CaptureError(
                f"{model.name} attends outside of transformers' attention interface, so its values"
                " are not seen; use edges='attention'"
            )
        arguments, _ = make_probe_inputs(model, model.model)
        with evaluating(model.model), running(model):
            WIRINGS[model.model] = find_wirings(model.model, arguments)
    return WIRINGS[model.model]
