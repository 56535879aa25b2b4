"""The methods of a page: rows that it cannot compute, averages to compare with, maximum flows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from attnflow.analysis.generate.prompt_attention import PromptAttention
from attnflow.analysis.job import MethodChoice
from attnflow.analysis.page.pack import (
    flag_saturated,
    pack_array,
    pack_flags,
    pack_flow,
    pack_rows,
    pool_tiles,
)
from attnflow.analysis.page.schema import (
    MOST_FLOWS,
    Flow,
    Graphs,
    Grouped,
    Others,
    Packed,
    PageMethod,
    Positions,
    Switches,
    Tokens,
)
from attnflow.analysis.page.tokens import group_units
from attnflow.analysis.run import MethodRun
from attnflow.core.arrays import Floats
from attnflow.core.choices import Method as Function
from attnflow.core.choices import accepts, run_method
from attnflow.core.comparison import compare_rows
from attnflow.core.evenness import find_even_spread, say_nothing
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, sum_groups
from attnflow.core.methods import flow, max_flow, raw, rollout
from attnflow.core.results import TokenAttention
from attnflow.errors import printable
from attnflow.notices import ignore_notices

ROW_BYTES = 16_000_000  # if a method has more rows, only those of one position are kept
BOTH = 512  # tokens up to which others are compared with the positions left out and with them
FLOWS = 8_000_000  # edges of a graph above which maximum flows are left out
# methods that the page computes itself
COMPUTED: dict[Function, Literal["raw", "rollout"]] = {raw: "raw", rollout: "rollout"}
# titles of methods and importances, and what they mean
VIEW_TITLES = {
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
    "relevance rollout": (
        "Relevance rollout",
        "Rollout over attention that carried the target's logit here: weights times their gradient"
        " in a linearised backward pass, where positive, the residual with weight 1.",
    ),
    "relevance flow": (
        "Relevance flow",
        "The most that could travel over attention that carried the target's logit here: weights"
        " times their gradient in a linearised backward pass, where positive, the residual with"
        " weight 1.",
    ),
    "relevance": (
        "Relevance",
        "The signed share of the token in the logit of the target.",
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


def title_name(name: str) -> tuple[str, str]:
    """The title of a method or an importance, and what it means."""
    title, meaning = VIEW_TITLES.get(name, (name, ""))
    return printable(title), meaning


def describe_run(
    run: MethodRun, position: int, tokens: Tokens, packed: Graphs, number: int | None
) -> PageMethod:
    """One result of an explanation, with the rows that the page cannot compute.

    position: the explained one. number: of its graph among the packed ones.
    """
    result, graph = run.result, run.graph
    title, meaning = title_name(run.name)
    size = len(tokens.tokens)
    everywhere = size > 1 and list(result.positions) == list(range(size))
    computed = COMPUTED.get(run.method)
    whole = packed.graphs is not None and packed.graphs[0].weights is not None
    by_itself = computed and whole and graph is not None and graph.residual is not None
    by_itself = by_itself and result.sources is None  # the page computes rows of one position
    method = PageMethod(
        name=run.name,
        title=title,
        meaning=meaning,
        method=run.name.removeprefix(f"{result.edges} "),
        edges=result.edges,
        graph=None if result.sources else number,  # whose paths begin at one position
        computed=computed if by_itself else None,
        others=compare_with_others(result, tokens) if everywhere else None,
        tiles=pool_tiles(result.values, result.positions) if everywhere else None,
    )
    if by_itself:
        return replace(method, even=flag_even(result, position, tokens, {}))
    alone = 2 * result.values.size > ROW_BYTES or (computed is not None and not whole)
    return add_rows(method, run, position, tokens, alone=alone)


def add_rows(
    method: PageMethod, run: MethodRun, position: int, tokens: Tokens, *, alone: bool
) -> PageMethod:
    """Add the rows of a result, of one position if `alone`, and what follows from its graph."""
    result, graph = run.result, run.graph
    place = result.positions.index(position)
    shown = slice(place, place + 1) if alone else slice(None)
    method = replace(method, rows=pack_rows(result.values[:, shown], result.positions[shown]))
    if result.saturated is not None:
        method = replace(method, saturated=flag_saturated(result.saturated[:, shown]))
    grouped: dict[str, TokenAttention] = {}
    if graph is not None and not adds_up(result) and accepts(run.method, "groups"):
        grouped = group_rows(run, graph, position, tokens)
        packed = {unit: pack_rows(found.values, [position]) for unit, found in grouped.items()}
        method = replace(method, grouped=Grouped(**packed))
    method = replace(method, even=flag_even(result, position, tokens, grouped))
    if graph is None:
        return method
    if run.method is flow and graph.depth * graph.size**2 <= FLOWS:
        explained = result.select(position).members[0]
        flows = find_read_flows(graph, result.at(position), explained, tokens)
        method = replace(method, flows=flows)
    return method


def flag_even(
    result: TokenAttention,
    position: int,
    tokens: Tokens,
    grouped: Mapping[str, TokenAttention],
) -> dict[str, tuple[Switches, ...]]:
    """By unit, which rows of a position say nothing, in its layers: in this unit, or in tokens.

    grouped: the rows to words and to sentences, if they are not sums.
    """
    flags: dict[str, list[bool]] = {"token": [], "word": [], "sentence": []}
    for layer in result.layers:
        by_token = result.select(position, layer).compared_with("even", exclude=tokens.asides)
        is_even = find_even_spread(by_token) is not None
        flags["token"].append(is_even)
        for unit, groups in group_units(tokens.units).items():
            found = by_token.grouped(groups) if adds_up(result) else None
            if unit in grouped:
                row = grouped[unit].select(position, layer)
                found = row.compared_with("even", exclude=tokens.asides)
            flags[unit].append(
                is_even or (found is not None and find_even_spread(found) is not None)
            )
    return {unit: pack_flags(np.array(each)[:, None]) for unit, each in flags.items()}


def flag_generated(result: PromptAttention, tokens: Tokens) -> dict[str, tuple[Switches, ...]]:
    """The same for all tokens of a generation."""
    size = len(result.prompt)
    compared = result.compared_with("even", exclude=[at for at in tokens.asides if at < size])
    even = say_nothing(compared.shares, compared.expected > 0)  # [layer, generated]
    flags = {"token": pack_flags(even)}
    for unit, groups in group_units(tokens.units).items():
        found = compared.grouped([group for group in groups if group.positions[0] < size])
        sums = result.saturated is None
        also = say_nothing(found.shares, found.expected > 0) if sums else np.zeros_like(even)
        flags[unit] = pack_flags(even | also)
    return flags


def adds_up(result: TokenAttention) -> bool:
    """Whether the value of a group is the sum of the values of its tokens."""
    return result.saturated is None and result.normalize != "receptive_field"


def group_rows(
    run: MethodRun, graph: AttentionGraph, position: int, tokens: Tokens
) -> dict[str, TokenAttention]:
    """The rows [layer, 1, group] of a position to words and to sentences."""
    grouped: dict[str, TokenAttention] = {}
    for unit, groups in group_units(tokens.units).items():
        if any(set(group.positions) & set(graph.removed) for group in groups):
            continue
        with ignore_notices():
            grouped[unit] = run_method(
                run.name,
                run.method,
                graph,
                layers=list(run.result.layers),
                positions=None if run.result.sources else [position],
                sources=run.result.sources,
                normalize=run.result.normalize,
                groups=groups,
            )
    return grouped


def find_read_flows(
    graph: AttentionGraph, row: Floats, explained: Positions, tokens: Tokens
) -> tuple[Flow, ...]:
    """The maximum flows to the tokens, words and sentences that positions read most."""
    units: list[list[Positions]] = [[(place,) for place in range(graph.size)]]
    for unit in (tokens.units.word, tokens.units.sentence):
        units.append([places for places in unit if len(places) > 1])
    unwanted = {*tokens.asides, *graph.removed}
    found = []
    for targets in units:
        weights = np.array([row[list(places)].max() for places in targets])
        order = np.argsort(-weights, kind="stable").tolist()
        wanted = [at for at in order if weights[at] > 0 and not unwanted & set(targets[at])]
        found += [
            max_flow(graph, source=(graph.depth, explained), target=(0, targets[at]))
            for at in wanted[:MOST_FLOWS]
        ]
    return tuple(map(pack_flow, found))


def describe_generated(
    result: PromptAttention,
    choice: MethodChoice,
    tokens: Tokens,
    packed: Graphs,
    graphs: Sequence[AttentionGraph],
    number: int,
) -> PageMethod:
    """One result of a generation, with all its rows. number: of its graph, if there are graphs."""
    title, meaning = title_name(result.method)
    computed = COMPUTED.get(choice.compute)
    by_itself = packed.graphs is not None and choice.edges == "attention"
    positions = range(len(result.prompt) - 1, len(result.prompt) - 1 + len(result.generated))
    rows = result.values.transpose(2, 0, 1)  # [layer, generated, prompt]
    method = PageMethod(
        name=result.method,
        title=title,
        meaning=meaning,
        method=choice.method,
        edges=choice.edges,
        graph=None if packed.graphs is None else number,
        computed=computed if by_itself else None,
        rows=pack_rows(rows, positions),
        others=describe_other_tokens(result, tokens) if len(result.generated) > 1 else None,
        even=flag_generated(result, tokens),
        sums_to_one=computed is not None and (not graphs or sums_to_one(graphs[number])),
    )
    if result.saturated is None:
        return method
    return replace(method, saturated=flag_saturated(result.saturated.transpose(2, 0, 1)))


# ---- averages to compare with -------------------------------------------------------------------


def compare_with_others(result: TokenAttention, tokens: Tokens) -> Others:
    """By unit, what all positions read of a key on average, in multiples of its even share."""
    units: dict[str, tuple[Group, ...] | None] = {"token": None}
    if adds_up(result):
        units |= group_units(tokens.units)

    def pack(asides: Sequence[int]) -> Mapping[str, Packed]:
        layers: dict[str, list[Floats]] = {unit: [] for unit in units}
        for place, layer in enumerate(result.layers):  # one at a time: they are large
            values = result.values[place : place + 1]
            rows = replace(result, values=values, layers=(layer,), limits=None, lost=None)
            compared = rows.compared_with("even", exclude=asides)
            for unit, groups in units.items():
                grouped = compared if groups is None else compared.grouped(groups)
                layers[unit].append(average_ratio(grouped.ratio[0]))
        return {unit: pack_layers(found) for unit, found in layers.items()}

    both = len(result.tokens) <= BOTH
    return Others(without=pack(tokens.asides), with_asides=pack(()) if both else None)


def pack_layers(layers: Iterable[Floats]) -> Packed:
    """Means and counts [2, key] of every layer as [2, layer, key]."""
    return pack_array(np.stack(list(layers), axis=1))


def average_ratio(ratio: Floats) -> Floats:
    """[2, key]: of ratios [query, key], the mean over queries without NaN, and their number."""
    count = np.isfinite(ratio).sum(axis=0)
    averages: Floats = np.stack([np.nansum(ratio, axis=0) / np.maximum(count, 1), count])
    return averages


def describe_other_tokens(result: PromptAttention, tokens: Tokens) -> Others:
    """By unit, what all generated tokens read on average, in multiples of even shares."""
    size = len(result.prompt)
    units = {"token": tuple(Group("", (place,)) for place in range(size))}
    if result.saturated is None:
        for unit, groups in group_units(tokens.units).items():
            units[unit] = tuple(group for group in groups if group.positions[0] < size)

    def pack(asides: Sequence[int]) -> Mapping[str, Packed]:
        return {
            unit: pack_layers(
                average_ratio(divide_by_even(layer, groups, asides))
                for layer in sum_groups(result.values.transpose(2, 0, 1), groups)
            )
            for unit, groups in units.items()
        }

    return Others(without=pack(tokens.asides), with_asides=pack(()))


def divide_by_even(rows: Floats, groups: Sequence[Group], asides: Sequence[int]) -> Floats:
    """[generated, group]: rows of one layer over even shares; NaN where these are 0."""
    counts = np.tile([len(group.positions) for group in groups], (len(rows), 1))
    gone = [at for at, group in enumerate(groups) if set(group.positions) & set(asides)]
    shares, even, _ = compare_rows(rows, counts, gone, "even")
    return np.divide(shares, even, out=np.full_like(shares, np.nan), where=even > 0)


def sums_to_one(graph: AttentionGraph) -> bool:
    """Whether rows of a graph sum to 1, so that the rest of a row lies outside of the prompt."""
    return graph.residual is not None or bool(np.abs(graph.weights.sum(axis=-1) - 1.0).max() < 1e-3)
