"""One self-contained interactive HTML page from an `Explanation` or a `Generation`.

Data, script and style are inlined. Numbers are stored as float16 in base64: 3 digits, as many as
the page shows. Raw attention and rollout are computed in the page from the fused weights if edges
are attention; all other methods, and importance, are stored. All text reaches the page as JSON,
and the document through `textContent` only.
"""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from attnflow.analysis.defaults import Plan
from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generation import Generation
from attnflow.analysis.prompt_attention import PromptAttention
from attnflow.core.arrays import Array
from attnflow.core.attention import Attention
from attnflow.core.custom import Method
from attnflow.core.files import dump_json
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group
from attnflow.core.methods import raw, rollout
from attnflow.core.requests import MOSTLY, are_even
from attnflow.core.results import TokenAttention
from attnflow.core.text import is_common, show_token
from attnflow.edges.choosing import name_result
from attnflow.errors import printable
from attnflow.notices import collect_notices
from attnflow.show.colours import AGAINST, DARK_AGAINST, DARK_RAMP, RAMP

GRAPH_BYTES = 64_000_000  # a larger graph is left out, as float16; 24 layers of 1,024 tokens fit
HEAD_BYTES = 20_000_000  # the same for the weights of every head
ROW_BYTES = 16_000_000  # ... and for the rows of one method, of which then one position is kept
FRAME_BYTES = 20_000_000  # a larger page is not shown inside a notebook
LONG = 256  # positions above which a generation's page leaves out what takes seconds there
HEIGHT = 900  # pixels of the frame in a notebook
COMPUTED: dict[Method, str] = {raw: "raw", rollout: "rollout"}  # what the page computes by itself
# what the page calls a method or an importance, and what it says of it
TITLES = {
    "raw": (
        "Raw",
        "What this position reads from the layer below, by the model's own weights.",
    ),
    "rollout": (
        "Rollout",
        "Attention rollout: the share of every input token that arrives here, over all paths.",
    ),
    "flow": (
        "Flow",
        "Attention flow: the most that could travel between here and every input token, over all"
        " paths together.",
    ),
    "contribution rollout": (
        "Contribution rollout",
        "Rollout over what each layer took: how much nearer each part brought the stream to what it"
        " became, the residual at its true size.",
    ),
    "gradient rollout": (
        "Gradient rollout",
        "Rollout over attention that speaks for the target: weights times their gradient, where"
        " positive, the residual with weight 1.",
    ),
    "gradient flow": (
        "Gradient flow",
        "The most that could travel over attention that speaks for the target: weights times their"
        " gradient, where positive, the residual with weight 1.",
    ),
    "blank_out": (
        "Blank-out",
        "How much the probability falls when the token is blanked out.",
    ),
    "input_gradient": (
        "Input gradient",
        "How steeply the probability changes with the token's embedding.",
    ),
}
COLOURS = {
    "light": RAMP,
    "dark": DARK_RAMP,
    "lightAgainst": AGAINST,
    "darkAgainst": DARK_AGAINST,
}

Data = dict[str, Any]


def explanation_page(explanation: Explanation) -> str:
    """The page of one explanation: coloured tokens by every method, graph, heat map, tables.

    >>> from attnflow import explain
    >>> explanation_page(explain("the key to the cabinets"))[:15]
    '<!doctype html>'
    """
    graph = explanation.graph
    graphs = list({id(network): network for network in explanation.graphs.values()}.values())
    packed: Data = {}
    notes = list(explanation.notes)
    if graph is not None:
        packed, notes = pack_graphs(explanation.captured, graphs or [graph])
    methods = [
        describe_result(
            name,
            result,
            explanation.position,
            explanation.functions.get(name),
            explanation.graphs.get(name),
            packed,
        )
        | {"graph": graphs.index(explanation.graphs[name]) if graphs else None}
        for name, result in explanation.results.items()
    ]
    normalize = next((result.normalize for result in explanation.results.values()), None)
    data: Data = {
        "kind": "explanation",
        "text": printable(" ‖ ".join(explanation.texts)),
        "model": printable(explanation.model),
        "prediction": describe_prediction(explanation.prediction),
        "position": explanation.position,
        "normalize": normalize,
        "methods": methods,
        "first": explanation.first,
        "importance": [
            {
                "name": name,
                **describe_name(name),
                "target": show_token(importance.target),
                "probability": importance.probability,
                "signed": importance.signed,
                "values": round_numbers(importance.values),
            }
            for name, importance in explanation.importance.items()
        ],
        "notes": notes,
        "source": str(explanation.source),
        **packed,
        **describe_tokens(explanation.tokens, explanation.special),
        **(describe_graph(graph) if graph is not None else describe_rows(explanation)),
    }
    return fill_template(data)


def generation_page(generation: Generation, plan: Plan | None = None) -> str:
    """The page of one generation: a generated token colours the prompt with its row of M.

    plan: by kind of edges, the methods to show; what the generation shows by itself if None.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from attnflow import generate
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
    >>> generation_page(generate(model, [464, 1994], max_new_tokens=3, eos_token_id=None))[:15]
    '<!doctype html>'
    """
    asked, plan = plan is not None, generation.plan() if plan is None else plan
    on_attention = None if generation.captured is None else generation.attention.graph()
    # edges that watch a token have a graph per token: their paths are not drawn
    graphs = [generation.graphs.get(edges, on_attention) for edges in plan if on_attention]
    packed, notes = pack_graphs(generation.captured, graphs) if graphs else ({}, [])
    notes = [*generation.notes, *notes]
    shown = []
    for place, (edges, functions) in enumerate(plan.items()):
        for method, function in functions.items():
            name = name_result(edges, method)
            size = len(generation.prompt) + len(generation.tokens) - 1
            long = size > LONG and function not in COMPUTED
            if long and not asked:
                notes.append(
                    f"{describe_name(name)['title']} is left out of this page above {LONG} tokens;"
                    f" generation.by({method!r}, edges={edges!r}) computes it."
                )
                continue
            with collect_notices():  # the page says so itself, where it is so
                result = generation.by({method: function}, edges=edges)
            computed = COMPUTED.get(function) if "graphs" in packed else None
            if edges != "attention":
                computed = None
            facts = {"computed": computed, "graph": place if graphs else None}
            shown.append(describe_prompt_attention(result, generation) | facts)
            last = result
    tokens = (*generation.prompt, *generation.tokens)
    data: Data = {
        "kind": "generation",
        "text": printable(generation.text),
        "prompt": generation.size,
        "position": generation.size - 1,
        "probabilities": round_numbers(generation.probabilities),
        "normalize": None,
        "methods": shown,
        "first": choose_first_name(shown),
        "importance": [],
        "notes": notes,
        "source": str(graphs[0].source if graphs else last.source),
        **packed,
        **describe_tokens(tokens, [token in generation.special for token in tokens]),
        **describe_generated(generation, on_attention, last),
    }
    return fill_template(data)


def framed(page: str) -> str:
    """The page inside an iframe for a notebook, so that styles do not mix.

    Its scripts cannot reach the notebook.

    >>> framed("<p>hello</p>")[:31]
    '<iframe title="attnflow" srcdoc'
    """
    if len(page) > FRAME_BYTES:
        size = f"{len(page) / 1e6:.0f} MB"
        return (
            f"<p>This page has {size}, too much for a notebook: write it with"
            " <code>.save('page.html')</code> and open that file.</p>"
        )
    style = f"width:100%;height:{HEIGHT}px;border:0"
    attributes = f'sandbox="allow-scripts allow-downloads" style="{style}"'
    return f'<iframe title="attnflow" srcdoc="{html.escape(page)}" {attributes}></iframe>'


def choose_first_name(methods: Sequence[Data]) -> str:
    """The method that a generation's page shows first: rollout, unless other edges come first."""
    names = [method["name"] for method in methods]
    return "rollout" if names[0] == "raw" and "rollout" in names else str(names[0])


# ---- the methods --------------------------------------------------------------------------------


def describe_name(name: str) -> Data:
    """The title and the explanation of a method or an importance on the page."""
    title, meaning = TITLES.get(name, (name, ""))
    return {"title": printable(title), "meaning": meaning}


def describe_prediction(prediction: tuple[str, float] | None) -> tuple[str, float] | None:
    """The predicted label for people to read: for a language model it is a token."""
    return None if prediction is None else (show_token(prediction[0]), prediction[1])


def describe_result(
    name: str,
    result: TokenAttention,
    position: int,
    function: Method | None,
    graph: AttentionGraph | None,
    packed: Mapping[str, Any],
) -> Data:
    """One method of an explanation for JSON: its name, and rows that the page cannot compute."""
    data: Data = {"name": name, **describe_name(name)}
    kind = COMPUTED.get(function) if function is not None else None
    computed = "graphs" in packed and graph is not None and graph.residual is not None
    if kind is not None and computed:
        return data | {"computed": kind}
    many = 2 * result.values.size > ROW_BYTES or (kind is not None and "graphs" not in packed)
    place = result.positions.index(position)
    shown = slice(place, place + 1) if many else slice(None)
    data["rows"] = pack_rows(result.values[:, shown], result.positions[shown])
    if result.saturated is not None:
        spread, keys = result.spread[:, shown], result.visible_keys[:, shown]
        data["saturated"] = flag_saturated(result.saturated[:, shown])
        data["spread"] = [round_numbers(row) for row in spread.tolist()]
        data["even"] = pack_flags(are_even(spread, keys))
    return data


def describe_prompt_attention(result: PromptAttention, generation: Generation) -> Data:
    """One method of a generation for JSON, with all its rows."""
    data: Data = {"name": result.method, **describe_name(result.method)}
    data["rows"] = pack_rows(result.values.transpose(2, 0, 1), generation.positions)
    if result.saturated is not None:
        spread = result.spread.T  # [layer, generated]
        data["saturated"] = flag_saturated(result.saturated.transpose(2, 0, 1))
        data["spread"] = [round_numbers(row) for row in spread.tolist()]
        data["even"] = pack_flags(are_even(spread, generation.size))
    return data


# ---- the data -----------------------------------------------------------------------------------


def pack_array(array: Array) -> Data:
    """An array as base64 of float16, little endian, with its shape."""
    return {
        "shape": list(array.shape),
        "float16": base64.b64encode(np.ascontiguousarray(array, dtype="<f2").tobytes()).decode(),
    }


def pack_rows(values: Array, positions: Iterable[int]) -> Data:
    """Rows that the page does not compute: values [layer, query, key] of some positions."""
    return {"positions": list(positions), "values": pack_array(values)}


def round_numbers(values: Iterable[float]) -> list[float]:
    """Numbers rounded to 5 digits: importance may be too small, or too large, for float16."""
    return [float(f"{value:.4e}") for value in values]


def pack_flags(values: Array) -> list[list[int]]:
    """[layer, query] as 0 and 1."""
    return [[int(flag) for flag in row] for row in values]


def flag_saturated(saturated: Array) -> list[list[int]]:
    """[layer, query]: 1 where most of a row [layer, query, key] is saturated.

    Such a row says nothing about its source.
    """
    return pack_flags(saturated.mean(axis=-1) > MOSTLY)


def pack_graphs(
    attention: Attention | None, graphs: Sequence[AttentionGraph]
) -> tuple[Data, list[str]]:
    """The graphs, and the weights of every head, as far as they fit; and notes.

    Edges with the residual inside are divided by their largest row sum: the page draws shares.
    """
    packed: Data = {}
    notes = []
    graph = graphs[0]
    if 2 * sum(network.weights.size for network in graphs) <= GRAPH_BYTES:
        packed["graphs"] = [pack_graph(network) for network in graphs]
    else:
        notes.append(
            f"The graph of {graph.depth} layers and {graph.size:,} tokens is too large for a page;"
            " only the rows asked for are here."
        )
    if attention is None or attention.heads == 1 or attention.depth != graph.depth:
        return packed, notes
    if 2 * attention.weights.size <= HEAD_BYTES:
        packed["heads"] = pack_array(attention.weights)
    else:
        notes.append(
            f"The weights of all {attention.heads} heads are too large for a page;"
            " their mean is shown."
        )
    return packed, notes


def pack_graph(graph: AttentionGraph) -> Data:
    """The weights of a graph, or its edges where they hold the residual."""
    scale = 1.0
    if graph.residual is None:
        scale = float(graph.weights.sum(axis=-1).max()) or 1.0
    return {
        "edges": printable(graph.edge_name),
        "residual": graph.residual,
        "weights": pack_array(graph.weights / scale),
    }


def describe_tokens(tokens: Iterable[str], special: Iterable[bool]) -> Data:
    """Tokens for JSON."""
    names = list(tokens)
    return {
        "tokens": names,
        "names": [show_token(token) for token in names],
        "special": [int(mark) for mark in special],
        "common": [int(is_common(token)) for token in names],
        "colours": COLOURS,
    }


def describe_graph(graph: AttentionGraph) -> Data:
    """Layers for JSON."""
    return {
        "removed": list(graph.removed),
        "depth": graph.depth,
        "size": graph.size,
        "causal": graph.causal,
        "window": list(graph.window),
        "layers": None if graph.layer_names is None else list(graph.layer_names),
    }


def describe_rows(explanation: Explanation) -> Data:
    """The same for an explanation that has rows and no graph."""
    first = next(iter(explanation.results.values()), None)
    return {
        "removed": [] if first is None else list(first.removed),
        "depth": explanation.depth,
        "size": len(explanation.tokens),
        "causal": first is not None and first.causal,
        "window": [None] * explanation.depth if first is None else list(first.window or ()),
        "layers": None,
        "segments": describe_segments(explanation.segments),
    }


def describe_generated(
    generation: Generation, graph: AttentionGraph | None, result: PromptAttention
) -> Data:
    """The same for a generation, which may have rows and no graph."""
    if graph is not None:
        return describe_graph(graph)
    return {
        "removed": [],
        "depth": len(result.layers),
        "size": len(generation.prompt) + len(generation.tokens) - 1,
        "causal": True,
        "window": [None] * len(result.layers),
        "layers": None,
        "segments": describe_segments(generation.segments),
    }


def describe_segments(segments: Iterable[Group]) -> list[Data]:
    """Turns or sentences for JSON: one bar each."""
    return [{"name": printable(group.name), "positions": group.positions} for group in segments]


# ---- the file -----------------------------------------------------------------------------------

UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def encode_json(data: Data) -> str:
    """JSON for use inside a script element: it cannot end the element or start a comment."""
    return dump_json(data, separators=(",", ":")).translate(UNSAFE)


@cache
def read_asset(name: str) -> str:
    """The text of an asset of the page."""
    return (files("attnflow.show") / "page_assets" / name).read_text(encoding="utf-8")


def fill_template(data: Data) -> str:
    """Fill style, script and data into the template.

    Data comes last, so that nothing in it is taken for a placeholder.
    """
    page = (
        read_asset("page.html")
        .replace("{{css}}", read_asset("page.css"))
        .replace("{{js}}", read_asset("page.js"))
    )
    before, after = page.split("{{data}}")
    return f"{before}{encode_json(data)}{after}"
