"""Queries and keys of a long prompt and its continuation, kept while a model generates.

With its cache a model runs over the prompt once and then over one token at a time; the last step
sees the keys of all positions. So the queries of all steps, one below another, and the last keys
equal those of one pass over the whole, as long as only the future is hidden. They do not if a mask
hides more, or a cache drops keys; then no layers are returned.
"""

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from attnflow.models.attention_calls import AttentionCall
from attnflow.models.families import SCORE_BIAS
from attnflow.models.model import Model
from attnflow.rows.products import Recomputed, read_call

if TYPE_CHECKING:
    import torch


class CachedLayers:
    """The attention of every layer of a model, collected over the steps of one sequence."""

    def __init__(self, model: Model) -> None:
        self.depth = model.depth or 0
        self.prefilled: list[Recomputed] = []  # the layers of the first step
        self.queries: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.keys: dict[int, torch.Tensor] = {}  # of the last step
        self.count = 0

    def take(self, call: AttentionCall) -> None:
        """Add the call of one layer in one step."""
        if not self.depth:
            return
        step, place = divmod(self.count, self.depth)
        self.count += 1
        if step == 0:
            layer = read_call(call)
            is_plain = isinstance(layer, Recomputed) and SCORE_BIAS not in layer.options
            if isinstance(layer, Recomputed) and is_plain and layer.hides_future:
                self.prefilled.append(layer)
        if len(self.prefilled) <= place:  # not only the future is hidden
            self.depth = 0
            self.queries.clear()
            self.keys.clear()
            return
        self.queries[place].append(call.query)
        self.keys[place] = call.key

    def join(self, size: int) -> list[Recomputed] | None:
        """The layers over the first positions; None if the calls do not determine them."""
        import torch

        if len(self.keys) < self.depth:
            return None  # some layer attends outside of the interface
        layers = []
        for place in range(self.depth):
            query, key = torch.cat(self.queries[place], dim=2), self.keys[place]
            if query.shape[2] != key.shape[2] or query.shape[2] < size:
                return None  # the cache drops keys, or has room for more
            layer = self.prefilled[place]
            layers.append(replace(layer, query=query[:, :, :size], key=key[:, :, :size]))
            self.queries[place].clear()
        return layers or None
