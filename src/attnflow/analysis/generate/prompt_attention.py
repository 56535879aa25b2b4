"""`PromptAttention`: token attention over the prompt, for every generated token and layer."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_positions
from attnflow.core.comparison import Comparison, check_reference, compare_layers
from attnflow.core.groups import list_numbers
from attnflow.core.io.tables import ArrayTable
from attnflow.core.io.views import format_heat_map
from attnflow.core.provenance import Source
from attnflow.core.results import measure_spread
from attnflow.core.row_table import KEY_COLUMNS
from attnflow.core.text import COMMON_WORDS, is_common
from attnflow.errors import OptionError, ShareWarning
from attnflow.notices import give_notice

LITTLE_KEPT = 0.01  # a kept share below this is warned of


@dataclass(frozen=True, eq=False)
class PromptAttention(ArrayTable):
    """M: how much each prompt token reached each generated one, in each layer.

    Parameters
    ----------
    values
        [generated token, prompt token, layer]; np.asarray gives them too.
    method
        The name of the method.
    prompt, generated
        The names of the tokens.
    layers
        The numbers of the layers.
    special
        The tokenizer's special tokens.
    kept
        [generated token, layer]: the share of each row that `filtered` kept, before the rest was
        made to sum to 1; None if nothing was filtered.
    saturated
        [generated token, prompt token, layer], of flow: where source or target alone limit it.
    edges
        What an edge of the graph weighs.
    source
        Where the values came from.
    passed
        [generated token, token of the answer, layer], of results with through=True: the share of a
        row that passed through each token of the answer, 1 for its own token.
    answer
        The names of these tokens.

    >>> found = PromptAttention(np.full((1, 2, 1), 0.5), "rollout", ("the", "key"), ("is",), (1,))
    >>> list(found.rows())
    [('rollout', 1, 0, 'is', 0, 'the', 0.5), ('rollout', 1, 0, 'is', 1, 'key', 0.5)]
    """

    columns: ClassVar = (*KEY_COLUMNS, "value")

    values: Floats  # [generated, prompt, layer]
    method: str
    prompt: tuple[str, ...]
    generated: tuple[str, ...]
    layers: tuple[int, ...]
    special: frozenset[str] = frozenset()
    kept: Floats | None = None  # [generated, layer]
    saturated: npt.NDArray[np.bool_] | None = None  # [generated, prompt, layer]
    edges: str = "attention"
    source: Source | None = None
    passed: Floats | None = None  # [generated, token of the answer, layer]
    answer: tuple[str, ...] = ()

    @cached_property
    def spread(self) -> Floats:
        """[generated token, layer]: 0 where a row is even over the prompt, 1 if all is on one."""
        rows = self.values.transpose(0, 2, 1)  # [generated, layer, prompt]
        return measure_spread(rows, np.ones(rows.shape, bool))

    @property
    def read(self) -> npt.NDArray[np.bool_]:
        """[prompt token]: whether it is read in any layer; else it was taken out of the graph."""
        return np.asarray(self.values.any(axis=(0, 2)))

    def find_place(self, layer: int | None = None) -> int:
        """The place of a layer in the last axis of `values`.

        Parameters
        ----------
        layer
            One of `layers`; the top one if None.
        """
        chosen = max(self.layers) if layer is None else layer
        if chosen not in self.layers:
            raise OptionError(
                f"layer must be one of {list_numbers(self.layers)}, those of this result;"
                f" got {layer}",
                options=["layer"],
            )
        return self.layers.index(chosen)

    def at_layer(self, layer: int) -> "PromptAttention":
        """The same in one layer only.

        Parameters
        ----------
        layer
            One of `layers`.
        """
        place = self.find_place(layer)
        part = slice(place, place + 1)
        return replace(
            self,
            values=self.values[:, :, part],
            layers=(self.layers[place],),
            kept=None if self.kept is None else self.kept[:, part],
            saturated=None if self.saturated is None else self.saturated[:, :, part],
            passed=None if self.passed is None else self.passed[:, :, part],
        )

    def filtered(
        self,
        *,
        words: Collection[str] = COMMON_WORDS,
        punctuation: bool = True,
        special: bool = True,
    ) -> "PromptAttention":
        """The same without some prompt tokens, the rest summing to 1 again.

        `.kept` holds the share of each row that was kept. A warning is given if hardly any was, as
        the rest is noise then.

        Parameters
        ----------
        words
            Words to take out, in lower case; English function words by default.
        punctuation, special
            Whether to take out punctuation, and the tokenizer's special tokens.
        """
        unwanted = {word.lower() for word in check_filter(words)}

        def stays(token: str) -> bool:
            if token in self.special:
                return not special
            return not is_common(token, unwanted, punctuation)

        places = [place for place, token in enumerate(self.prompt) if stays(token)]
        if not places:
            raise OptionError(
                "filtering must leave at least one prompt token; got none:"
                " give words=() or punctuation=False"
            )
        whole = self.values.sum(axis=1)  # [generated, layer]
        values = self.values[:, places]
        sums = values.sum(axis=1)
        kept = np.divide(sums, whole, out=np.zeros_like(sums), where=whole > 0)
        kept = kept if self.kept is None else kept * self.kept
        if kept[:, -1].min() < LITTLE_KEPT:
            give_notice(
                f"filtering kept {kept[:, -1].min():.2g} of a row of {self.method}: what is shown"
                " is what the tokens that were taken out left over; look at it unfiltered",
                ShareWarning,
            )
        return replace(
            self,
            values=normalise_prompt(values),
            prompt=tuple(self.prompt[place] for place in places),
            kept=kept,
            saturated=None if self.saturated is None else self.saturated[:, places],
        )

    def compared_with(self, reference: str, *, exclude: Iterable[int] = ()) -> Comparison:
        """Compare the row of every generated token with its expectation.

        The arrays of a `Comparison` have the axes [layer, generated token, prompt token].

        Parameters
        ----------
        reference
            "even": attention without preference among the prompt tokens. "others": the mean of the
            other generated tokens in the same layer; at least two.
        exclude
            The places of prompt tokens to leave out first, such as sinks. The rest of each row sums
            to 1 again.

        >>> values = np.array([[[0.6], [0.4]], [[0.2], [0.8]]])
        >>> read = PromptAttention(values, "rollout", ("a", "key"), ("is", "lost"), (1,))
        >>> read.compared_with("others").difference.round(3).tolist()
        [[[0.4, -0.4], [-0.4, 0.4]]]
        """
        check_reference(reference, len(self.generated))
        excluded = tuple(dict.fromkeys(check_positions(exclude, len(self.prompt), "exclude")))
        counts = np.broadcast_to(self.read, self.values.shape[:2])
        layers = [
            (self.values[:, :, place], counts.astype(np.int64)) for place in range(len(self.layers))
        ]
        return Comparison(
            *compare_layers(layers, excluded, reference),
            reference=reference,
            excluded=excluded,
            method=self.method,
            layers=self.layers,
            positions=tuple(range(len(self.generated))),
            tokens=self.prompt,
            queries=self.generated,
            size=len(self.generated),
            source=self.source,
        )

    def rows(self) -> Iterator[tuple[str, int, int, str, int, str, float]]:
        """(method, layer, position, query, key, token, value) for each value.

        position and query: the number of the generated token, and the token; key and token: those
        of the prompt.
        """
        for i, new in enumerate(self.generated):
            for j, old in enumerate(self.prompt):
                for layer, value in zip(self.layers, self.values[i, j].tolist(), strict=True):
                    yield self.method, layer, i, new, j, old, value

    def _content(self) -> dict[str, object]:
        content: dict[str, object] = {
            "method": self.method,
            "edges": self.edges,
            "prompt": self.prompt,
            "generated": self.generated,
            "layers": self.layers,
            "values": self.values,
        }
        if self.kept is not None:
            content["kept"] = self.kept
        if self.passed is not None:
            content |= {"passed": self.passed, "answer": self.answer}
        return content

    def _repr_html_(self) -> str:
        caption = f"{self.method}, layer {self.layers[-1]}: what each generated token looked at"
        top = self.values[:, :, -1]
        return format_heat_map(
            top, self.generated, self.prompt, caption=caption, source=self.source
        )

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        return "<PromptAttention: {}, {} generated x {} prompt tokens x {} layers>".format(
            self.method, *self.values.shape
        )


@dataclass(frozen=True, eq=False)
class PromptTable(ArrayTable):
    """Several results of one generation as one table.

    Parameters
    ----------
    text
        The generated text.
    probabilities
        Of each generated token, when it was chosen.
    results
        At least one.
    """

    columns: ClassVar = PromptAttention.columns

    text: str
    probabilities: tuple[float, ...]
    results: tuple[PromptAttention, ...]

    @property
    def source(self) -> Source | None:
        """Where all results came from, without what differs between them."""
        source = self.results[0].source
        if source is None:
            return None
        return replace(source, method=None, edges=None, target=None, residual=None)

    def rows(self) -> Iterator[tuple[str, int, int, str, int, str, float]]:
        """Those of all results, as `PromptAttention.rows` gives them."""
        return chain.from_iterable(result.rows() for result in self.results)

    def _content(self) -> dict[str, object]:
        first = self.results[0]
        named = {result.method: result.values for result in self.results}
        return {
            "text": self.text,
            "prompt": first.prompt,
            "generated": first.generated,
            "probabilities": self.probabilities,
            "layers": first.layers,
            **named,
        }


def check_filter(words: object) -> list[str]:
    """Words to filter, several or one."""
    listed = [words] if isinstance(words, str) else words
    kept = list(listed) if isinstance(listed, Iterable) else [None]
    if not all(isinstance(word, str) for word in kept):
        raise OptionError(f"words must be a list of words, () for none; got {words!r}")
    return cast(list[str], kept)


def normalise_prompt(values: Floats) -> Floats:
    """Values [generated, prompt, layer], scaled to sum to 1 over the prompt unless all are 0."""
    sums = values.sum(axis=1, keepdims=True)
    shares: Floats = np.divide(values, sums, out=np.zeros_like(values), where=sums > 0)
    return shares
