"""The methods of a page as data for JSON: rows that it cannot compute, what others read, flows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generation import Generation
from attnflow.analysis.prompt_attention import PromptAttention
from attnflow.analysis.top_flows import find_top_flows
from attnflow.core.arrays import Floats
from attnflow.core.comparison import compare_rows
from attnflow.core.custom import Method, accepts, run_method
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, sum_groups
from attnflow.core.methods import flow, raw, rollout
from attnflow.core.requests import are_even
from attnflow.core.results import TokenAttention
from attnflow.core.text import show_token
from attnflow.errors import printable
from attnflow.notices import ignore_notices
from attnflow.show.page_packing import (
    Data,
    flag_saturated,
    pack_array,
    pack_flags,
    pack_flow,
    pack_rows,
    pool_tiles,
    round_numbers,
)

ROW_BYTES = 16_000_000  # of more rows of one method one position is kept
BOTH = 512  # tokens up to which others are compared with the positions left out and with them
FLOWS = 8_000_000  # edges of a graph above which maximum flows are left out
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


def describe_name(name: str) -> Data:
    """The title and the explanation of a method or an importance on the page."""
    title, meaning = TITLES.get(name, (name, ""))
    return {"title": printable(title), "meaning": meaning}


def describe_prediction(prediction: tuple[str, float] | None) -> tuple[str, float] | None:
    """The predicted label for people to read: for a language model it is a token."""
    return None if prediction is None else (show_token(prediction[0]), prediction[1])


def choose_asides(positions: Iterable[int], size: int) -> list[int]:
    """What the shares leave out: these positions, unless nothing would be left."""
    asides = sorted({place for place in positions if place < size})
    return asides if len(asides) < size else []


def describe_word_importance(
    explanation: Explanation, name: str, units: Data
) -> list[float] | None:
    """The importance of each word; a word of which a part stands alone has that of its tokens."""
    scored = explanation.word_importance.get(name)
    if scored is None or scored.groups is None:
        return None
    known = {
        group.positions: value for group, value in zip(scored.groups, scored.values, strict=True)
    }
    single = explanation.importance[name].values
    return round_numbers(
        known.get(tuple(word), float(single[word].sum())) for word in units["units"]["word"]
    )


def describe_sinks(found: Explanation | Generation) -> list[tuple[int, float]]:
    """The positions that take a large share of every row, with that share."""
    return [(sink.position, round(sink.share, 4)) for sink in found.sinks]


def describe_result(
    explanation: Explanation, name: str, packed: Mapping[str, Any], units: Data
) -> Data:
    """One method of an explanation for JSON: its name, and rows that the page cannot compute."""
    result, graph = explanation.results[name], explanation.graphs.get(name)
    function, position = explanation.functions.get(name), explanation.position
    short = name.removeprefix(f"{result.edges} ")
    data: Data = {"name": name, "method": short, "edges": result.edges, **describe_name(name)}
    kind = COMPUTED.get(function) if function is not None else None
    everywhere = list(result.positions) == list(range(len(explanation.tokens)))
    if everywhere and len(result.positions) > 1:
        data["others"] = describe_others(result, units)
        data["tiles"] = pool_tiles(result.values, result.positions)
    whole = "graphs" in packed and "weights" in packed["graphs"][0]
    if kind is not None and whole and graph is not None and graph.residual is not None:
        return data | {"computed": kind}
    many = 2 * result.values.size > ROW_BYTES or (kind is not None and not whole)
    place = result.positions.index(position)
    shown = slice(place, place + 1) if many else slice(None)
    data["rows"] = pack_rows(result.values[:, shown], result.positions[shown])
    if result.saturated is not None:
        spread, keys = result.spread[:, shown], result.visible_keys[:, shown]
        data["saturated"] = flag_saturated(result.saturated[:, shown])
        data["spread"] = [round_numbers(row) for row in spread.tolist()]
        data["even"] = pack_flags(are_even(spread, keys))
    if graph is not None and function is not None and needs_groups(result, function):
        data["grouped"] = group_rows(name, function, graph, result, position, units)
    if graph is not None and function is flow and graph.depth * graph.size**2 <= FLOWS:
        data["flows"] = describe_flows(graph, result.at(position), explanation.position, units)
    return data


def needs_groups(result: TokenAttention, function: Method) -> bool:
    """Whether what reaches a group is not the sum of what reaches its tokens."""
    adds_up = result.saturated is None and result.normalize != "receptive_field"
    return not adds_up and accepts(function, "groups")


def group_rows(
    name: str,
    function: Method,
    graph: AttentionGraph,
    result: TokenAttention,
    position: int,
    units: Data,
) -> Data:
    """By unit, the rows [layer, 1, group] of a position to words and sentences."""
    grouped: Data = {}
    for unit in ("word", "sentence"):
        groups = [Group("", tuple(group)) for group in units["units"][unit]]
        groups = [group for group in groups if not set(group.positions) & set(graph.removed)]
        if not groups or len(groups) != len(units["units"][unit]):
            continue
        options: dict[str, Any] = {"layers": list(result.layers), "positions": [position]}
        options |= {"normalize": result.normalize, "groups": groups}
        with ignore_notices():
            found = run_method(name, function, graph, **options)
        grouped[unit] = pack_rows(found.values, [position])
    return grouped


def describe_flows(graph: AttentionGraph, row: Floats, position: int, units: Data) -> list[Data]:
    """The maximum flows to the tokens, and to the words of several, that are read most."""
    sinks = units["asides"]
    single = [Group("", (place,)) for place in range(graph.size)]
    found = find_top_flows(graph, position, row, single, leave_out=sinks)
    for unit in ("word", "sentence"):
        groups = [tuple(group) for group in units["units"][unit] if len(group) > 1]
        weights = np.array([row[list(group)].max() for group in groups])
        if groups:
            several = [Group("", group) for group in groups]
            found += find_top_flows(graph, position, weights, several, leave_out=sinks)
    return [pack_flow(each) for each in found]


def describe_prompt_attention(
    result: PromptAttention, generation: Generation, units: Data, asides: Sequence[int]
) -> Data:
    """One method of a generation for JSON, with all its rows."""
    data: Data = {"name": result.method, **describe_name(result.method)}
    data["rows"] = pack_rows(result.values.transpose(2, 0, 1), generation.positions)
    if len(generation.tokens) > 1:
        data["others"] = describe_other_tokens(result, units, asides)
    if result.saturated is not None:
        spread = result.spread.T  # [layer, generated]
        data["saturated"] = flag_saturated(result.saturated.transpose(2, 0, 1))
        data["spread"] = [round_numbers(row) for row in spread.tolist()]
        data["even"] = pack_flags(are_even(spread, generation.size))
    return data


def describe_others(result: TokenAttention, units: Data) -> Data:
    """By unit and by what is left out, how many times its even share others give each key.

    Packed [2, layer, key]: the mean over all rows that see a key, and how many rows those are.
    """
    groups: dict[str, tuple[Group, ...] | None] = {"token": None}
    if result.saturated is None and result.normalize != "receptive_field":
        for unit, places in units["units"].items():
            groups[unit] = tuple(Group("", tuple(group)) for group in places)
    variants = {"without": units["asides"]}
    if len(result.tokens) <= BOTH:
        variants["with"] = []
    others: Data = {}
    for unit, together in groups.items():
        for variant, asides in variants.items():
            layers = [
                average_times(take_layer(result, place, together), asides)
                for place in range(len(result.layers))
            ]
            others.setdefault(variant, {})[unit] = pack_array(np.stack(layers, axis=1))
    return others


def take_layer(
    result: TokenAttention, place: int, groups: tuple[Group, ...] | None
) -> TokenAttention:
    """One layer of a result, summed over groups."""
    values = result.values[place : place + 1]
    layer = replace(result, values=values, layers=(result.layers[place],), limits=None)
    if groups is None:
        return layer
    names = tuple("" for _ in groups)
    values = sum_groups(values, groups)
    return replace(layer, values=values, tokens=names, groups=groups, words=None)


def average_times(layer: TokenAttention, asides: Sequence[int]) -> Floats:
    """[2, key]: of one layer, the mean of shares over even shares, and how many rows have one."""
    ratio = layer.compared_with("even", exclude=asides).ratio[0]  # [query, key]
    count = np.isfinite(ratio).sum(axis=0)
    times: Floats = np.stack([np.nansum(ratio, axis=0) / np.maximum(count, 1), count])
    return times


def describe_other_tokens(result: PromptAttention, units: Data, asides: Sequence[int]) -> Data:
    """The same of a generation, over its tokens."""
    size = len(result.prompt)
    groups = {"token": [[place] for place in range(size)]}
    if result.saturated is None:
        groups |= {
            unit: [group for group in places if group[0] < size]
            for unit, places in units["units"].items()
        }
    others: Data = {}
    for unit, places in groups.items():
        together = [Group("", tuple(group)) for group in places]
        rows = sum_groups(result.values.transpose(2, 0, 1), together)  # [layer, generated, group]
        counts = np.tile([len(group) for group in places], (rows.shape[1], 1))
        for variant, unwanted in {"without": asides, "with": []}.items():
            gone = [at for at, group in enumerate(places) if set(group) & set(unwanted)]
            layers = []
            for layer in rows:
                shares, even, _ = compare_rows(layer, counts, gone, "even")
                seen = even > 0
                ratio = np.divide(shares, even, out=np.zeros_like(shares), where=seen)
                number = seen.sum(axis=0)
                layers.append(np.stack([ratio.sum(axis=0) / np.maximum(number, 1), number]))
            others.setdefault(variant, {})[unit] = pack_array(np.stack(layers, axis=1))
    return others


def sums_to_one(graph: AttentionGraph) -> bool:
    """Whether what leaves a node arrives: then a row's rest lies outside of the prompt."""
    return graph.residual is not None or bool(np.abs(graph.weights.sum(axis=-1) - 1.0).max() < 1e-3)
