"""`Change`: what an intervention changes, as it is given, and as positions, edges and heads."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from attnflow.capturing.change import CallChange, Changes, CutEdge, LayerPlace
from attnflow.core.checks import check_integers, check_list, check_position, is_integer
from attnflow.core.flow.max_flow import MaxFlow
from attnflow.core.graph import freeze
from attnflow.core.text import show_token
from attnflow.errors import OptionError
from attnflow.models.encoded import Encoded

if TYPE_CHECKING:
    import torch

Edge = tuple[int, ...]  # (layer, query, key) or (layer, query, key, head)
Blanked = str | int | tuple[int, int]  # a passage of the text, a position, or a span (start, end)
HeadPair = tuple[int, int]  # (layer, head)


@dataclass(frozen=True, init=False)
class Change:
    """What one intervention changes; all of it at once.

    Parameters
    ----------
    blank
        Tokens to blank out: passages of the text that stand in it once, positions, or spans
        (start, end) of positions; or one of them.
    cut
        Edges of attention to cut: (layer, query, key) in all heads, or (layer, query, key, head);
        or a `MaxFlow`, whose minimum cut is cut; or a list of these.
    heads_off
        (layer, head) pairs of heads to switch off.

    >>> Change(blank="keys", heads_off=[(1, 0), (1, 1)])
    Change(blank=('keys',), cut=(), heads_off=((1, 0), (1, 1)))
    """

    blank: tuple[Blanked, ...]
    cut: tuple[Edge | MaxFlow, ...]
    heads_off: tuple[HeadPair, ...]

    def __init__(
        self,
        blank: Blanked | Iterable[Blanked] = (),
        cut: MaxFlow | Iterable[Iterable[int] | MaxFlow] = (),
        heads_off: Iterable[Iterable[int]] = (),
    ) -> None:
        single = isinstance(blank, str) or is_integer(blank)
        blanked = [blank] if single else check_list(blank, "blank")
        edges = [cut] if isinstance(cut, MaxFlow) else check_list(cut, "cut")
        freeze(
            self,
            blank=tuple(map(check_blanked, blanked)),
            cut=tuple(map(check_edge, edges)),
            heads_off=tuple(map(check_pair, check_list(heads_off, "heads_off"))),
        )

    @property
    def flows(self) -> list[MaxFlow]:
        """The flows whose minimum cuts are cut."""
        return [each for each in self.cut if isinstance(each, MaxFlow)]


def check_blanked(given: object) -> Blanked:
    """A passage, a position or a span, by its form."""
    if isinstance(given, str):
        return given
    numbers = check_integers(given, "blank")
    if isinstance(given, Iterable):
        if len(numbers) != 2:
            raise OptionError(
                "blank takes passages of the text, positions, and spans (start, end) of positions;"
                f" got {given!r}"
            )
        return numbers[0], numbers[1]
    return numbers[0]


def check_edge(given: object) -> Edge | MaxFlow:
    """An edge or a flow, by its form."""
    if isinstance(given, MaxFlow):
        return given
    is_edge = isinstance(given, Iterable) and not isinstance(given, str)
    numbers = check_integers(given, "an edge to cut") if is_edge else []
    if len(numbers) not in (3, 4):
        raise OptionError(
            "an edge to cut is (layer, query, key) or (layer, query, key, head), or a MaxFlow;"
            f" got {given!r}"
        )
    return tuple(numbers)


def check_pair(given: object) -> HeadPair:
    """A head, by its form."""
    is_pair = isinstance(given, Iterable) and not isinstance(given, str)
    numbers = check_integers(given, "heads_off") if is_pair else []
    if len(numbers) != 2:
        raise OptionError(f"heads_off takes (layer, head) pairs; got {given!r}")
    return numbers[0], numbers[1]


class ReadChange(NamedTuple):
    """A change of one input, checked.

    Parameters
    ----------
    blanked
        The positions that are blanked out.
    cut
        (layer, query, key) or (layer, query, key, head) of the edges that are cut.
    heads_off
        (layer, head) of the heads that are switched off.
    residual_share
        The share of the capacity of a cut that the residual connection holds, which is not cut;
        None without a `MaxFlow`.
    """

    blanked: tuple[int, ...] = ()
    cut: tuple[Edge, ...] = ()
    heads_off: tuple[HeadPair, ...] = ()
    residual_share: float | None = None

    @property
    def changes_attention(self) -> bool:
        """Whether attention itself is changed, and not only the input."""
        return bool(self.cut or self.heads_off)

    def describe(self, tokens: Sequence[str]) -> str:
        """What was changed, in a few words.

        >>> ReadChange((1,), ((2, 0, 1),), ((1, 3),)).describe(["the", "keys"])
        'keys blanked, 1 edge cut, head 1.3 off'
        """
        parts = []
        if self.blanked:
            parts.append(f"{' '.join(show_token(tokens[at]) for at in self.blanked)} blanked")
        if self.cut:
            parts.append(f"{len(self.cut)} {'edge' if len(self.cut) == 1 else 'edges'} cut")
        if len(self.heads_off) > 4:
            parts.append(f"{len(self.heads_off)} heads off")
        elif self.heads_off:
            names = ", ".join(f"{layer}.{head}" for layer, head in self.heads_off)
            parts.append(f"{'head' if len(self.heads_off) == 1 else 'heads'} {names} off")
        return ", ".join(parts) or "nothing changed"


def read_change(
    change: Change,
    encoded: Encoded,
    layers: Sequence[LayerPlace],
    model: str,
    fingerprint: str,
    more: int = 0,
) -> ReadChange:
    """A change with its positions, edges and heads, checked against an input and its layers.

    model, fingerprint: of the model, which flows must be of. more: positions after the input, which
    are generated.
    """
    cut: dict[Edge, None] = {}
    held = capacity = 0.0
    for given in change.cut:
        if isinstance(given, MaxFlow):
            check_flow(given, encoded, len(layers), model, fingerprint)
            capacity += given.cut_capacity
            held += measure_residual(given, layers)
            for edge in given.cut:
                if is_attention(layers[edge[0] - 1], edge):
                    cut[edge] = None
        else:
            cut[place_edge(given, encoded, layers, more)] = None
    return ReadChange(
        find_blanked(change.blank, encoded),
        tuple(cut),
        read_heads(change.heads_off, layers),
        (held / capacity if capacity > 0 else 0.0) if change.flows else None,
    )


def localise(
    change: Change,
    read: ReadChange,
    layers: Sequence[LayerPlace],
    means: "Mapping[int, torch.Tensor] | None",
) -> Changes:
    """The change of each attention call. means: by call, what heads give instead of zero."""
    flows = {edge for flow in change.flows for edge in flow.cut}  # had a capacity, so they exist
    cut: dict[int, list[CutEdge]] = {}
    hidden = set(read.blanked)
    for edge in read.cut:
        place = layers[edge[0] - 1]
        query, key = edge[1] - place.rows.start, edge[2] - place.columns.start
        head = edge[3] if len(edge) > 3 else None
        is_checked = edge not in flows and not hidden & {edge[1], edge[2]}
        cut.setdefault(place.call, []).append(CutEdge(query, key, head, edge, is_checked))
    off: dict[int, dict[int, torch.Tensor | None]] = {}
    for layer, head in read.heads_off:
        call = layers[layer - 1].call
        off.setdefault(call, {})[head] = None if means is None else means[call][head]
    return {
        call: CallChange(tuple(cut.get(call, ())), off.get(call, {}))
        for call in dict.fromkeys([*cut, *off])
    }


# ---- blanked tokens ------------------------------------------------------------------------------


def find_blanked(blank: Iterable[Blanked], encoded: Encoded) -> tuple[int, ...]:
    """The positions to blank out, in order."""
    size = len(encoded.tokens)
    found: set[int] = set()
    for given in blank:
        if isinstance(given, str):
            found.update(find_passage_once(encoded, given))
        elif isinstance(given, tuple):
            if not 0 <= given[0] < given[1] <= size:
                raise OptionError(
                    f"a span is (start, end) within the {size} positions; got {given}"
                )
            found.update(range(*given))
        else:
            found.add(check_position(given, size, "a position"))
    return tuple(sorted(found))


def find_passage_once(encoded: Encoded, passage: str) -> Sequence[int]:
    """The positions of whole words, or else of characters, that stand in the text once."""
    if encoded.text is None or encoded.offsets is None:
        places = [[at] for at, token in enumerate(encoded.tokens) if token == passage]
    else:
        wanted = re.escape(passage.strip()) or "(?!)"  # nothing is nowhere
        found = list(re.finditer(rf"(?<!\w){wanted}(?!\w)", encoded.text))
        found = found or list(re.finditer(wanted, encoded.text))
        places = [list_touched(encoded, *each.span()) for each in found]
    if len(places) != 1:
        raise OptionError(
            f"a passage must stand in the text once; got {passage!r}, which stands"
            f" there {len(places)} times: give positions"
        )
    return places[0]


def list_touched(encoded: Encoded, start: int, end: int) -> list[int]:
    """The positions of the tokens with any of these characters, from start to before end."""
    return [
        at
        for at, (first, characters) in enumerate(
            zip(encoded.starts.tolist(), encoded.offsets or (), strict=True)
        )
        if characters is not None and max(start, first) < min(end, characters[1])
    ]


# ---- edges and heads -----------------------------------------------------------------------------


def place_edge(numbers: Edge, encoded: Encoded, layers: Sequence[LayerPlace], more: int) -> Edge:
    """An edge (layer, query, key) or (layer, query, key, head), checked."""
    place = find_place(numbers[0], layers, "an edge to cut")
    size = len(encoded.tokens) + len(encoded.decoder_tokens)
    query, key = (
        at if size <= at < size + more else check_position(at, size, "the positions of an edge")
        for at in numbers[1:3]
    )
    is_later = max(query, key) >= size
    if not is_later and not is_attention(place, (numbers[0], query, key)):
        raise OptionError(
            f"{place.name} attends from positions {place.rows.start}..{place.rows.stop - 1} to"
            f" positions {place.columns.start}..{place.columns.stop - 1}; got the edge"
            f" {numbers}"
        )
    if len(numbers) == 3:
        return numbers[0], query, key
    return numbers[0], query, key, read_head(numbers[3], place)


def find_place(layer: int, layers: Sequence[LayerPlace], what: str) -> LayerPlace:
    """The layer with this number."""
    if not 1 <= layer <= len(layers):
        raise OptionError(f"the layer of {what} must be from 1 to {len(layers)}; got {layer}")
    return layers[layer - 1]


def read_head(head: int, place: LayerPlace) -> int:
    """The number of a head, checked."""
    if not 0 <= head < place.heads:
        raise OptionError(f"a head of {place.name} must be from 0 to {place.heads - 1}; got {head}")
    return head


def read_heads(given: Iterable[HeadPair], layers: Sequence[LayerPlace]) -> tuple[HeadPair, ...]:
    """The heads to switch off, checked."""
    pairs: dict[HeadPair, None] = {}
    for layer, head in given:
        place = find_place(layer, layers, "a head to switch off")
        pairs[layer, read_head(head, place)] = None
    return tuple(pairs)


def is_attention(place: LayerPlace, edge: Sequence[int]) -> bool:
    """Whether a layer attends from this query to this key, other than by the residual."""
    rows, columns = place.rows, place.columns
    return edge[1] in range(rows.start, rows.stop) and edge[2] in range(columns.start, columns.stop)


# ---- minimum cuts --------------------------------------------------------------------------------


def check_flow(flow: MaxFlow, encoded: Encoded, depth: int, model: str, fingerprint: str) -> None:
    """Refuse a flow through the graph of another input or another model."""
    known = None if flow.provenance is None else flow.provenance.fingerprint
    if known not in (None, fingerprint):
        raise OptionError(
            f"a MaxFlow to cut must be of the same model, {model}; got one of"
            f" {flow.provenance.model if flow.provenance else None}"
        )
    tokens = (*encoded.tokens, *encoded.decoder_tokens)
    numbers = tuple(map(str, range(len(tokens))))
    if flow.tokens not in (tokens, numbers):
        raise OptionError(
            "a MaxFlow to cut must be of the same input; got one of"
            f" {len(flow.tokens)} positions ({' '.join(map(show_token, flow.tokens[:8]))} ...),"
            f" and this input has {len(tokens)} ({' '.join(map(show_token, tokens[:8]))} ...)"
        )
    highest = flow.target[0] + len(flow.edges)
    if highest > depth:
        raise OptionError(
            f"a MaxFlow to cut must be of this model's {depth} layers; got one from layer {highest}"
        )


def measure_residual(flow: MaxFlow, layers: Sequence[LayerPlace]) -> float:
    """The capacity of a minimum cut that is the residual connection's.

    Where a graph has the residual inside its edges, an edge from a position to itself counts as a
    whole.
    """
    residual = None if flow.provenance is None else flow.provenance.residual
    held = 0.0
    for layer, query, key in flow.cut:
        capacity = float(flow.edges[layer - flow.target[0] - 1, query, key])  # a cut edge is full
        if not is_attention(layers[layer - 1], (layer, query, key)):
            held += capacity
        elif query == key:
            held += capacity if residual is None else min(residual, capacity)
    return held
