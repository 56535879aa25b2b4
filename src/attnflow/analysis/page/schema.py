"""The schema of a page's data: the types that its scripts read, and their conversion to JSON.

JSON names are camelCase. A field that is None is left out if None is its default, else it is null.
`types` writes the same types for the scripts.
"""

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Literal

from attnflow.analysis.explain.summary import DOUBTFUL
from attnflow.core.comparison import DOUBLINGS
from attnflow.core.evenness import EVEN, EVEN_PEAK, WORTH_A_WARNING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MOST_FLOWS = 10  # tokens, words and sentences each whose maximum flows are given
FLAT = {"flat": True}  # metadata of a part whose fields stand among those of the whole
Positions = tuple[int, ...]
NumberTuple = tuple[float, ...]
Switches = tuple[int, ...]  # 0 and 1
FlowEdge = tuple[int, int, int, float, int]  # layer, query, key, amount, 1 if in the cut
TableCell = str | float | None


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Numbers of 16 bits, little endian, in base64.

    Parameters
    ----------
    float16
        The bytes as they are.
    deflated
        All high bytes before all low ones, then deflated.
    """

    shape: tuple[int, ...]
    float16: str | None = None
    deflated: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of some positions.

    Parameters
    ----------
    values
        [layer, query, key]
    """

    positions: Positions
    values: Packed


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Rows of all positions as tiles: means over queries of sums over keys.

    Parameters
    ----------
    values
        [layer, tile, tile]
    """

    starts: Positions
    values: Packed


@dataclass(frozen=True, kw_only=True)
class Others:
    """By unit, the average of shares over even shares: [2, layer, key].

    The mean over the rows that see the key, and the number of these rows.

    Parameters
    ----------
    without
        For shares without the positions that are left out.
    with_asides
        For shares with them; not given for long texts.
    """

    without: Mapping[str, Packed]
    with_asides: Mapping[str, Packed] | None = field(default=None, metadata={"name": "with"})


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The rows to words and to sentences."""

    word: Rows | None = None
    sentence: Rows | None = None


@dataclass(frozen=True, kw_only=True)
class Flow:
    """A maximum flow from the explained position in the top layer to some positions.

    Parameters
    ----------
    edges
        The strongest edges and the cut: [layer, query, key, amount, 1 if in the cut].
    """

    target: Positions
    value: float
    edges: tuple[FlowEdge, ...]


@dataclass(frozen=True, kw_only=True)
class PageMethod:
    """One result.

    Parameters
    ----------
    method
        The name of the method, without its edges.
    graph
        The number of its graph.
    computed
        The method that the page runs on the graph itself.
    rows
        The rows that the page does not compute.
    grouped
        The rows of the explained position, if a word is not the sum of its tokens.
    saturated
        [layer, query]: 1 where most of a row is at its bound.
    even
        By unit, [layer, query]: 1 where a row says nothing, without the positions that are left
        out. The queries are the explained position, or all generated tokens.
    flows
        The maximum flows to what the explained position reads most.
    sums_to_one
        For a generation: whether the rest of a row lies outside of the prompt.
    """

    name: str
    title: str
    meaning: str
    method: str
    edges: str
    graph: int | None
    computed: Literal["raw", "rollout"] | None = None
    rows: Rows | None = None
    others: Others | None = None
    tiles: Tiles | None = None
    grouped: Grouped | None = None
    saturated: tuple[Switches, ...] | None = None
    even: Mapping[str, tuple[Switches, ...]] | None = None
    flows: tuple[Flow, ...] | None = None
    sums_to_one: bool | None = None


@dataclass(frozen=True, kw_only=True)
class PageImportance:
    """One importance, by token and by word.

    Parameters
    ----------
    score
        The logit, or difference of logits, that was watched instead of the probability.
    """

    name: str
    title: str
    meaning: str
    target: str
    probability: float
    signed: bool
    values: NumberTuple
    words: NumberTuple | None
    score: float | None = None


@dataclass(frozen=True, kw_only=True)
class PageGraph:
    """A graph that methods ran on.

    Parameters
    ----------
    residual
        None if the edges include it.
    weights
        [layer, query, key] before the residual is mixed in, or edges that include it, as shares.
    tops
        The top layer of every band.
    bands
        [band, query, key]: the shares that travel from the top of a band to that of the next one.
    """

    edges: str
    residual: float | None
    weights: Packed | None = None
    tops: tuple[int, ...] | None = None
    bands: Packed | None = None


@dataclass(frozen=True, kw_only=True)
class Graphs:
    """The graphs and the weights of every head, if they fit into a page.

    Parameters
    ----------
    heads
        [layer, head, query, key]
    """

    graphs: tuple[PageGraph, ...] | None = None
    heads: Packed | None = None


@dataclass(frozen=True, kw_only=True)
class PagePicture:
    """The patches of a vision model, row by row, and the picture below them.

    Parameters
    ----------
    patches
        The positions of the patches.
    source
        The picture, as a data URL.
    """

    down: int
    across: int
    patches: Positions
    source: str | None
    width: int
    height: int


@dataclass(frozen=True, kw_only=True)
class PageParts:
    """The two texts of an encoder-decoder.

    Parameters
    ----------
    target
        The first position of the target.
    """

    target: int


@dataclass(frozen=True, kw_only=True)
class Units:
    """The positions of every word and of every sentence."""

    word: tuple[Positions, ...]
    sentence: tuple[Positions, ...]


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens, and their words and sentences.

    Parameters
    ----------
    names
        The tokens as they are shown.
    special
        1 for special tokens, such as CLS and SEP.
    starts
        1 where a token begins a word.
    segments
        The names of the sentences, if these are the turns of a chat.
    asides
        The positions that shares leave out: sinks, special tokens, the explained one.
    """

    tokens: tuple[str, ...]
    names: tuple[str, ...]
    special: Switches
    starts: Switches
    units: Units
    asides: Positions
    segments: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class PageLayers:
    """The layers, and which keys a query sees in them.

    Parameters
    ----------
    removed
        The positions that were taken out of the graph.
    window
        By layer, how far back a query sees; None for all keys.
    layers
        The names of the layers, if they have names.
    """

    removed: Positions
    depth: int
    size: int
    causal: bool
    window: tuple[int | None, ...]
    layers: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The thresholds of what the page says and draws.

    Parameters
    ----------
    even
        The spread below which a row says nothing, ...
    peak
        ... if its largest share is also below this many times the even share.
    few
        The number of tokens below which a row is not judged.
    doublings
        The number of doublings of the expectation at the end of the scale.
    doubtful
        The rank correlation with blank-out below which a method is doubted.
    resting
        The number of tokens up to which the graph is drawn at rest.
    share
        The share of the mass that the paths carry at first.
    edges
        The maximum number of edges that are drawn.
    fold
        The number of tokens above which the text folds into sentences.
    rows
        The number of positions up to which the page computes the rows of all.
    hover
        The number of edges up to which paths follow the pointer.
    table
        The number of rows that a table shows at first.
    lines
        The number of tokens that are followed over the layers.
    flows
        The number of tokens, words and sentences each whose maximum flows are given.
    """

    even: float = EVEN
    peak: float = EVEN_PEAK
    few: int = WORTH_A_WARNING[1]
    doublings: int = DOUBLINGS
    doubtful: float = DOUBTFUL
    resting: int = 32
    share: float = 0.8
    edges: int = 400
    fold: int = 400
    rows: int = 128
    hover: int = 1_500_000
    table: int = 50
    lines: int = 6
    flows: int = MOST_FLOWS


@dataclass(frozen=True, kw_only=True)
class Colours:
    """The scales from weak to strong, in light and dark mode; and the colours of lines."""

    light: tuple[str, ...]
    dark: tuple[str, ...]
    light_against: tuple[str, ...]
    dark_against: tuple[str, ...]
    lines: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """The data of the page of an explanation or of a generation.

    Parameters
    ----------
    prediction
        Label and probability.
    position
        The explained position; of a generation, the one that predicted its first token.
    span
        The positions that are explained together, `position` the last of them; none if one is.
    sinks
        The position and the share of each.
    agreement
        By result, its rank correlation with blank-out.
    prompt
        For a generation: the number of prompt tokens.
    probabilities
        The probabilities of the generated tokens.
    colours
        Filled in where the page is drawn.
    """

    kind: Literal["explanation", "generation"]
    text: str
    model: str
    summary: str
    prediction: tuple[str, float] | None
    position: int
    normalize: str | None
    methods: tuple[PageMethod, ...]
    first: str
    sinks: tuple[tuple[int, float], ...]
    agreement: Mapping[str, float]
    importance: tuple[PageImportance, ...]
    picture: PagePicture | None
    parts: PageParts | None
    notes: tuple[str, ...]
    source: str
    tokens: Tokens = field(metadata=FLAT)
    layers: PageLayers = field(metadata=FLAT)
    graphs: Graphs = field(metadata=FLAT)
    span: Positions | None = None
    prompt: int | None = None
    probabilities: NumberTuple | None = None
    limits: Limits = field(default_factory=Limits)
    colours: Colours | None = None


# ---- strips: two explanations side by side, and lists of texts ----------------------------------


@dataclass(frozen=True, kw_only=True)
class PageSide:
    """One of two explanations.

    Parameters
    ----------
    left_out
        The share of the positions that are left out.
    """

    name: str
    method: str
    layer: int
    model: str
    prediction: tuple[str, float] | None
    left_out: float


@dataclass(frozen=True, kw_only=True)
class PagePair:
    """Two aligned tokens or words; None for what a side lacks or leaves out."""

    left: str | None
    right: str | None
    values: tuple[float | None, float | None]
    difference: float | None


@dataclass(frozen=True, kw_only=True)
class PageStrip:
    """A text in colours.

    Parameters
    ----------
    spaces
        1 where a space comes before a word.
    tones
        The colours, from -1 to 1; None for no colour.
    """

    words: tuple[str, ...]
    spaces: Switches
    tones: tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A row of the table.

    Parameters
    ----------
    page
        The address that the first cell links to.
    """

    page: str | None
    cells: tuple[TableCell, ...]
    strip: PageStrip | None = field(default=None, metadata=FLAT)


@dataclass(frozen=True, kw_only=True)
class Strips:
    """The data of a page of strips.

    Parameters
    ----------
    back
        The address of the page that lists all texts.
    unit
        The unit that is aligned: "token" or "word".
    colours
        Filled in where the page is drawn.
    """

    kind: Literal["pair", "corpus"]
    title: str
    kicker: str
    caption: str
    notes: tuple[str, ...]
    columns: tuple[str, ...]
    entries: tuple[Entry, ...]
    back: str | None = None
    unit: str | None = None
    sides: tuple[PageSide, PageSide] | None = None
    pairs: tuple[PagePair, ...] | None = None
    colours: Colours | None = None


# ---- JSON ---------------------------------------------------------------------------------------


def name_in_json(each: "Field[object]") -> str:
    """The name of a field in JSON: camelCase, unless its metadata names another."""
    first, *others = each.name.split("_")
    return str(each.metadata.get("name") or first + "".join(map(str.capitalize, others)))


def to_json(data: "DataclassInstance") -> dict[str, object]:
    """One of these types as a dict for JSON, without optional parts that are None.

    >>> to_json(Entry(page=None, cells=("key", 0.5)))
    {'page': None, 'cells': ('key', 0.5)}
    """
    content: dict[str, object] = {}
    for each in fields(data):
        part = getattr(data, each.name)
        if part is None and each.default is None:
            continue
        if each.metadata.get("flat"):
            content |= to_json(part)
        else:
            content[name_in_json(each)] = convert_part(part)
    return content


def convert_part(part: object) -> object:
    """A part of one of these types for JSON."""
    if isinstance(part, Mapping):
        return {key: convert_part(value) for key, value in part.items()}
    if isinstance(part, tuple) and part and is_dataclass(part[0]):
        return [convert_part(value) for value in part]
    return to_json(part) if is_dataclass(part) and not isinstance(part, type) else part
