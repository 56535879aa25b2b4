"""Queries and keys of a long prompt and of what follows it, kept while a model generates.

With its cache a model runs over the prompt once and then over one token at a time; the last step
sees the keys of all positions. So the queries of all steps, one below another, and the last keys
are those of one pass over everything, as long as nothing but the future is hidden. Where a mask
hides more, or a cache drops keys, this is not so, and there are no such layers.
"""

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from attnflow.capturing.carrying import Recomputed, read_call
from attnflow.models.families import SCORE_BIAS
from attnflow.models.listening import Heard
from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch


class CachedLayers:
    """The attention of every layer of a model, collected over the steps of one sequence."""

    def __init__(self, model: Model) -> None:
        self.depth = model.depth or 0
        self.prefilled: list[Recomputed] = []  # the layers of the first step
        self.queries: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self.keys: dict[int, torch.Tensor] = {}  # of the last step
        self.heard = 0

    def take(self, heard: Heard) -> None:
        """Take the call of one layer in one step."""
        if not self.depth:
            return
        step, place = divmod(self.heard, self.depth)
        self.heard += 1
        if step == 0:
            layer = read_call(heard)
            alone = isinstance(layer, Recomputed) and SCORE_BIAS not in layer.options
            if isinstance(layer, Recomputed) and alone and layer.hides_future:
                self.prefilled.append(layer)
        if len(self.prefilled) <= place:  # more than the future is hidden
            self.depth = 0
            self.queries.clear()
            self.keys.clear()
            return
        self.queries[place].append(heard.query)
        self.keys[place] = heard.key

    def join(self, size: int) -> list[Recomputed] | None:
        """The layers over the first positions; None where the calls do not tell them."""
        import torch

        if len(self.keys) < self.depth:
            return None  # it attends outside of the interface
        layers = []
        for place in range(self.depth):
            query, key = torch.cat(self.queries[place], dim=2), self.keys[place]
            if query.shape[2] != key.shape[2] or query.shape[2] < size:
                return None  # a cache that drops keys, or holds places for more
            layer = self.prefilled[place]
            layers.append(replace(layer, query=query[:, :, :size], key=key[:, :, :size]))
            self.queries[place].clear()
        return layers or None
