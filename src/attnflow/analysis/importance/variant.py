"""`Variant`: an input with some tokens replaced or hidden, and the arguments of several."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnflow.errors import OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.model import Model
from attnflow.models.predict import FoilNumber

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Variant:
    """An input with some tokens blanked out, or none."""

    encoded: Encoded
    position: int  # where its prediction is read
    target: int | None  # the class to watch; None: the predicted one
    foil: FoilNumber | None = None  # the class that the target is contrasted with, if any
    hidden: tuple[int, ...] = ()  # positions that attention masks out
    original: Encoded | None = None  # the input before the change, if no token has moved

    def find_start(self) -> int:
        """The first position, at most the one that is read, that a change can reach from before."""
        if self.original is None:
            return 0
        pairs = enumerate(zip(self.encoded.ids, self.original.ids, strict=True))
        changed = next((place for place, (mine, old) in pairs if mine != old), self.position)
        # a hidden token is hidden from later positions; what it computes itself is not read
        return min([self.position, changed, *(place + 1 for place in self.hidden)])


def batch_variants(model: Model, variants: Sequence[Variant]) -> "dict[str, torch.Tensor]":
    """The arguments of the torch model for several variants, padded on the right."""
    arguments = model.batch([variant.encoded for variant in variants])
    if "attention_mask" not in arguments and any(variant.hidden for variant in variants):
        raise OptionError(
            f"replacement='attention' needs an attention mask, and {model.name} takes none;"
            " give a token to put in place of others",
            options=["replacement='attention'"],
        )
    for row, variant in enumerate(variants):
        if variant.hidden:
            arguments["attention_mask"][row, list(variant.hidden)] = 0
    return arguments
