"""One self-contained interactive HTML page from an `Explanation` or a `Generation`: its data beside our own script and style.

The numbers travel as float16 in base64: 3 digits, which is what the page shows. Raw attention and rollout are computed in the page from
the fused weights; flow and importance are given. All text reaches the page as JSON, and the document through `textContent` only.
"""

import base64
import html
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generation import Generation, is_common
from attnflow.core.attention import Attention
from attnflow.core.files import dump_json
from attnflow.core.graph import Array, AttentionGraph
from attnflow.core.methods import MOSTLY, SATURATED, are_even
from attnflow.notices import collect_notices

GRAPH_BYTES = 64_000_000  # a larger graph is left out, as float16; 24 layers of 1,024 tokens fit
HEAD_BYTES = 20_000_000  # the same for the weights of every head
FRAME_BYTES = 20_000_000  # a larger page is not shown inside a notebook
FLOW_TOKENS = 256  # up to so many positions a generation's page has flow, which takes seconds there
HEIGHT = 900  # pixels of the frame in a notebook

Data = dict[str, Any]


def explanation_page(explanation: Explanation) -> str:
    """The page of one explanation: coloured tokens by every method, the layered graph, the heat map, the tables.

    >>> from attnflow import explain
    >>> explanation_page(explain("the key to the cabinets"))[:15]
    '<!doctype html>'
    """
    attention = explanation.attention
    graph = attention.graph(residual=explanation.residual)
    packed, notes = packed_weights(attention, graph)
    rows = {"flow": given_rows(explanation.flow.values, explanation.flow.positions)}
    if "weights" not in packed:
        for name in ("raw", "rollout"):
            result = explanation.methods[name]
            values = np.stack([result.at(explanation.position, layer) for layer in result.layers])[
                :, None
            ]
            rows[name] = given_rows(values, [explanation.position])
    data: Data = {
        "kind": "explanation",
        "text": " ‖ ".join(explanation.texts),
        "model": explanation.model,
        "prediction": explanation.prediction,
        "position": explanation.position,
        "normalize": explanation.rollout.normalize,
        "rows": rows,
        "saturated": None
        if explanation.flow.saturated is None
        else mostly(explanation.flow.saturated),
        "spread": rounded_rows(explanation.flow.spread),
        "even": flags(are_even(explanation.flow.spread, explanation.flow.visible_keys)),
        "importance": [
            {
                "name": name,
                "target": each.target,
                "probability": each.probability,
                "signed": each.signed,
                "values": rounded(each.values),
            }
            for name, each in explanation.importance.items()
        ],
        "notes": notes,
        **packed,
        **described(explanation.tokens, explanation.special, graph),
    }
    return assembled(data)


def generation_page(generation: Generation) -> str:
    """The page of one generation: a click on a generated token colours the prompt with its row of M[generated, prompt, layer].

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from attnflow import generate
    >>> model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=2, n_head=2))
    >>> generation_page(generate(model, [464, 1994], max_new_tokens=3, eos_token_id=None))[:15]
    '<!doctype html>'
    """
    graph = generation.attention.graph()
    packed, notes = packed_weights(generation.attention, graph)
    results = {"raw": generation.raw(), "rollout": generation.rollout()}
    saturated, spread, even = None, None, None
    if graph.size <= FLOW_TOKENS:
        with collect_notices():  # the page says so itself, where it is so
            flows = results["flow"] = generation.flow()
        sums = graph.layer_edges(1).sum(axis=0)[: generation.size, None]  # [prompt, 1]
        at_bound = flows.values >= np.minimum(1.0, sums) - SATURATED  # [generated, prompt, layer]
        saturated = mostly(at_bound.transpose(2, 0, 1))
        spread = rounded_rows(flows.spread.T)
        even = flags(are_even(flows.spread.T, generation.size))
    else:
        notes.append(
            f"Flow is left out of this page above {FLOW_TOKENS} tokens;"
            " generation.flow() computes it."
        )
    positions = range(generation.size - 1, graph.size)
    tokens = (*generation.prompt, *generation.tokens)
    data: Data = {
        "kind": "generation",
        "text": generation.text,
        "prompt": generation.size,
        "position": generation.size - 1,
        "probabilities": rounded(generation.probabilities),
        "normalize": None,
        "rows": {
            name: given_rows(result.values.transpose(2, 0, 1), positions)
            for name, result in results.items()
        },
        "saturated": saturated,
        "spread": spread,
        "even": even,
        "importance": [],
        "notes": notes,
        **packed,
        **described(tokens, [token in generation.special for token in tokens], graph),
    }
    return assembled(data)


def framed(page: str) -> str:
    """The page inside a frame, for a notebook: its styles and ours do not mix, and its scripts reach nothing outside.

    >>> framed("<p>hello</p>")[:31]
    '<iframe title="attnflow" srcdoc'
    """
    if len(page) > FRAME_BYTES:
        size = f"{len(page) / 1e6:.0f} MB"
        return f"<p>This page has {size}, too much for a notebook: write it with <code>.save('page.html')</code> and open that file.</p>"
    style = f"width:100%;height:{HEIGHT}px;border:0"
    sandbox = "allow-scripts allow-downloads"
    return f'<iframe title="attnflow" srcdoc="{html.escape(page)}" sandbox="{sandbox}" style="{style}"></iframe>'


# ---- the data -----------------------------------------------------------------------------------------------------------------


def pack(array: Array) -> Data:
    """An array as base64 of float16, little endian, with its shape."""
    return {
        "shape": list(array.shape),
        "float16": base64.b64encode(np.ascontiguousarray(array, dtype="<f2").tobytes()).decode(),
    }


def given_rows(values: Array, positions: Iterable[int]) -> Data:
    """Rows that the page does not compute: values [layer, query, key], of these positions."""
    return {"positions": list(positions), "values": pack(values)}


def rounded(values: Iterable[float]) -> list[float]:
    """Plain numbers of 5 digits: importance may be too small, or too large, for float16."""
    return [float(f"{value:.4e}") for value in values]


def rounded_rows(values: Array) -> list[list[float]]:
    """[layer, query] as plain numbers."""
    return [rounded(row) for row in values.tolist()]


def flags(values: Array) -> list[list[int]]:
    """[layer, query] as 0 and 1."""
    return [[int(each) for each in row] for row in values]


def mostly(saturated: Array) -> list[list[int]]:
    """[layer, query]: 1 where so much of a row [layer, query, key] is saturated that it says nothing about its source."""
    return [[int(share > MOSTLY) for share in layer] for layer in saturated.mean(axis=-1).tolist()]


def packed_weights(attention: Attention, graph: AttentionGraph) -> tuple[Data, list[str]]:
    """The fused weights and those of every head, as far as they fit, and what to say where they do not."""
    packed: Data = {}
    notes = []
    if 2 * graph.weights.size <= GRAPH_BYTES:
        packed["weights"] = pack(graph.weights)
    else:
        notes.append(
            f"The graph of {graph.depth} layers and {graph.size:,} tokens is too large for a page; only the rows asked for are here."
        )
    if attention.heads > 1 and 2 * attention.weights.size <= HEAD_BYTES:
        packed["heads"] = pack(attention.weights)
    elif attention.heads > 1:
        notes.append(
            f"The weights of all {attention.heads} heads are too large for a page; their mean is shown."
        )
    return packed, notes


def described(tokens: Iterable[str], special: Iterable[bool], graph: AttentionGraph) -> Data:
    """What the tokens and the layers are."""
    names = list(tokens)
    return {
        "tokens": names,
        "special": [int(each) for each in special],
        "common": [int(is_common(token)) for token in names],
        "depth": graph.depth,
        "size": graph.size,
        "residual": graph.residual,
        "causal": graph.causal,
        "window": list(graph.window),
        "layers": None if graph.layer_names is None else list(graph.layer_names),
    }


# ---- the file -----------------------------------------------------------------------------------------------------------------

UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def as_json(data: Data) -> str:
    """JSON that can stand inside a script element: nothing in it can end the element or start a comment."""
    return dump_json(data, separators=(",", ":")).translate(UNSAFE)


@cache
def asset(name: str) -> str:
    """One of the files that make the page."""
    return (files("attnflow.show") / "page_assets" / name).read_text(encoding="utf-8")


def assembled(data: Data) -> str:
    """The template with style, script and data in it; the data is put in last, so nothing in it is taken for a place to fill."""
    page = (
        asset("page.html").replace("{{css}}", asset("page.css")).replace("{{js}}", asset("page.js"))
    )
    before, after = page.split("{{data}}")
    return f"{before}{as_json(data)}{after}"
