"""What a page knows: an `Explanation` or a `Generation` as data for JSON.

Raw attention and rollout are computed in the page where edges are attention; all other methods,
importance, what others read on average and maximum flows are given. Limits and colours are defined
here, for the page too.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from attnflow.analysis.defaults import Plan
from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generation import Generation
from attnflow.analysis.summaries import DOUBTFUL, find_asides, tell_explanation
from attnflow.analysis.top_flows import TOP
from attnflow.core.comparison import DOUBLINGS
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group, list_words
from attnflow.core.requests import EVEN, WORTH_A_WARNING
from attnflow.core.text import number_marked, number_sentences, show_token, show_tokens
from attnflow.edges.choosing import name_result
from attnflow.errors import printable
from attnflow.notices import ignore_notices
from attnflow.show.colours import (
    AGAINST,
    DARK_AGAINST,
    DARK_RAMP,
    METHOD_COLOURS,
    OTHER_COLOURS,
    RAMP,
)
from attnflow.show.page_methods import (
    COMPUTED,
    choose_asides,
    describe_name,
    describe_prediction,
    describe_prompt_attention,
    describe_result,
    describe_sinks,
    describe_word_importance,
    sums_to_one,
)
from attnflow.show.page_packing import (
    Data,
    pack_graphs,
    round_numbers,
)
from attnflow.show.page_picture import describe_picture

LONG = 256  # positions above which a generation's page leaves out what takes seconds there
LIMITS = {
    "even": EVEN,  # the spread below which a method says nothing ...
    "few": WORTH_A_WARNING[1],  # ... of at least so many tokens
    "doublings": DOUBLINGS,  # of what is expected, to the end of the scale
    "doubtful": DOUBTFUL,  # a rank correlation with blank-out below this
    "resting": 32,  # tokens up to which the graph is drawn at rest
    "share": 0.8,  # of the mass that the paths carry at first
    "edges": 400,  # at most so many of them are drawn
    "fold": 400,  # tokens above which the text folds into sentences
    "rows": 128,  # positions up to which the page computes the rows of all
    "hover": 1_500_000,  # edges up to which paths follow the pointer
    "table": 50,  # rows of a table at first
    "lines": 6,  # tokens followed over the layers
    "flows": TOP,  # tokens whose maximum flow is given
}
COLOURS = {
    "light": RAMP,
    "dark": DARK_RAMP,
    "lightAgainst": AGAINST,
    "darkAgainst": DARK_AGAINST,
    "lines": [*METHOD_COLOURS.values(), *OTHER_COLOURS],
}


def describe_explanation(explanation: Explanation) -> Data:
    """All that the page of an explanation knows."""
    graphs = list({id(graph): graph for graph in explanation.graphs.values()}.values())
    packed, notes = pack_graphs(explanation.captured, graphs)
    asides = choose_asides(find_asides(explanation), len(explanation.tokens))
    units = describe_units(explanation.tokens, find_words(explanation), alone=asides)
    units = use_segments(units, explanation.segments, asides)
    picture, lack = describe_picture(explanation.text, explanation.tokens)
    methods = [
        describe_result(explanation, name, packed, units | {"asides": asides})
        | {"graph": graphs.index(explanation.graphs[name]) if "graphs" in packed else None}
        for name in explanation.results
    ]
    normalize = next((result.normalize for result in explanation.results.values()), None)
    return {
        "kind": "explanation",
        "text": printable(" ‖ ".join(explanation.texts)),
        "model": printable(explanation.model),
        "summary": printable(" ".join(tell_explanation(explanation)[0])),
        "prediction": describe_prediction(explanation.prediction),
        "position": explanation.position,
        "normalize": normalize,
        "methods": methods,
        "first": explanation.first,
        "sinks": describe_sinks(explanation),
        "asides": asides,
        "agreement": describe_agreement(explanation, asides),
        "importance": [
            {
                "name": name,
                **describe_name(name),
                "target": show_token(importance.target),
                "probability": importance.probability,
                "signed": importance.signed,
                "values": round_numbers(importance.values),
                "words": describe_word_importance(explanation, name, units),
            }
            for name, importance in explanation.importance.items()
        ],
        "picture": picture,
        "parts": describe_parts(explanation, graphs),
        "notes": [*(() if graphs else explanation.notes), *notes, *lack],
        "source": str(explanation.source),
        **packed,
        **units,
        **describe_tokens(explanation.tokens, explanation.special),
        **describe_layers(explanation, graphs),
    }


def describe_generation(generation: Generation, plan: Plan | None) -> Data:
    """All that the page of a generation knows; plan: what it shows, if not what it has."""
    asked, plan = plan is not None, generation.plan() if plan is None else plan
    on_attention = None if generation.captured is None else generation.attention.graph()
    # edges that watch a token have a graph per token: their paths are not drawn; a long prompt
    # has rows and no graph at all
    graphs = [generation.graphs.get(edges, on_attention) for edges in plan if on_attention]
    size = generation.size + len(generation.tokens) - 1
    tokens = (*generation.prompt, *generation.tokens)
    sinks = [sink for sink in describe_sinks(generation) if sink[0] < generation.size]
    special = [token in generation.special for token in tokens]
    held = {place for place, _ in sinks} | {at for at in range(generation.size) if special[at]}
    asides = choose_asides(held, generation.size)
    units = describe_units(tokens, None, alone=asides, breaks=(generation.size,))
    units = use_segments(units, generation.segments, asides)
    packed, notes = pack_graphs(generation.captured, graphs)
    notes = [*generation.notes, *notes]
    shown = []
    for place, (edges, functions) in enumerate(plan.items()):
        for method, function in functions.items():
            name = name_result(edges, method)
            if size > LONG and function not in COMPUTED and not asked:
                notes.append(
                    f"{describe_name(name)['title']} is left out of this page above {LONG} tokens;"
                    f" generation.by({method!r}, edges={edges!r}) computes it."
                )
                continue
            with ignore_notices():  # the page says so itself, where it is so
                result = generation.by({method: function}, edges=edges)
            computed = COMPUTED.get(function) if "graphs" in packed else None
            facts: Data = {"method": method, "edges": edges}
            facts |= {"computed": computed if edges == "attention" else None}
            facts |= {"graph": place if "graphs" in packed else None}
            adds_up = function in COMPUTED and (not graphs or sums_to_one(graphs[place]))
            facts |= {"sumsToOne": adds_up}
            source, depth = result.source, len(result.layers)
            shown.append(describe_prompt_attention(result, generation, units, asides) | facts)
    layers = describe_rows(size, depth, causal=True)
    return {
        "kind": "generation",
        "text": printable(generation.text),
        "model": printable((source.model if source else None) or ""),
        "summary": printable(generation.summary()),
        "prediction": None,
        "prompt": generation.size,
        "position": generation.size - 1,
        "probabilities": round_numbers(generation.probabilities),
        "normalize": None,
        "methods": shown,
        "first": choose_first_name(shown),
        "sinks": sinks,
        "asides": asides,
        "agreement": {},
        "importance": [],
        "picture": None,
        "parts": None,
        "notes": notes,
        "source": str(graphs[0].source if graphs else source),
        **packed,
        **units,
        **describe_tokens(tokens, special),
        **(layers if on_attention is None else describe_graph(on_attention)),
    }


def choose_first_name(methods: Sequence[Data]) -> str:
    """The method that a generation's page shows first: rollout, unless other edges come first."""
    names = [method["name"] for method in methods]
    return "rollout" if names[0] == "raw" and "rollout" in names else str(names[0])


def describe_agreement(explanation: Explanation, asides: Sequence[int]) -> dict[str, float]:
    """The rank correlations with blank-out, where there are enough tokens to rank."""
    few = len(explanation.tokens) - len(asides) < WORTH_A_WARNING[1]
    return {} if few else {name: round(rho, 4) for name, rho in explanation.agreement.items()}


# ---- tokens, words, sentences, layers ----------------------------------------------------------


def find_words(explanation: Explanation) -> Sequence[int | None] | None:
    """The number of the word of each token, where a result knows it."""
    return next((result.words for result in explanation.results.values()), None)


def describe_units(
    tokens: Sequence[str],
    words: Sequence[int | None] | None,
    *,
    alone: Iterable[int] = (),
    breaks: Sequence[int] = (),
) -> Data:
    """Which tokens begin a word, and the positions of every word and sentence.

    alone: positions that are no part of a word or a sentence; breaks: where both begin anew.
    """
    firsts = {word[0] for word in list_words(number_marked(tokens) if words is None else words)}
    firsts |= set(breaks)
    starts = [place in firsts for place in range(len(tokens))]
    sentences = number_sentences(tokens, starts)
    apart = {place + after for place in alone for after in (0, 1)} | {0, *breaks}
    units: dict[str, list[list[int]]] = {"word": [], "sentence": []}
    for place, starts_word in enumerate(starts):
        begins = {
            "word": starts_word,
            "sentence": place > 0 and sentences[place] != sentences[place - 1],
        }
        for unit, groups in units.items():
            if place in apart or begins[unit]:
                groups.append([])
            groups[-1].append(place)
    return {"starts": [int(start) for start in starts], "units": units}


def use_segments(units: Data, segments: Sequence[Group], asides: Sequence[int]) -> Data:
    """The units with the turns of a chat, or what else a text was cut into, for sentences."""
    if not segments:
        return units
    unwanted = set(asides)
    groups = [
        ([place for place in segment.positions if place not in unwanted], printable(segment.name))
        for segment in segments
    ]
    groups += [([place], "") for place in asides]
    held = {place for group, _ in groups for place in group}
    rest = [group for group in units["units"]["sentence"] if not held.intersection(group)]
    groups = sorted([(group, name) for group, name in groups if group] + [(g, "") for g in rest])
    sentences, names = [list(group) for group, _ in groups], [name for _, name in groups]
    return units | {"units": units["units"] | {"sentence": sentences}, "segments": names}


def describe_tokens(tokens: Iterable[str], special: Iterable[bool]) -> Data:
    """Tokens for JSON, with what the page is to do with them."""
    names = list(tokens)
    return {
        "tokens": names,
        "names": show_tokens(names),
        "special": [int(mark) for mark in special],
        "colours": COLOURS,
        "limits": LIMITS,
    }


def describe_graph(graph: AttentionGraph) -> Data:
    """The layers of a graph, and what a query may see in it."""
    return {
        "removed": list(graph.removed),
        "depth": graph.depth,
        "size": graph.size,
        "causal": graph.causal,
        "window": list(graph.window),
        "layers": None if graph.layer_names is None else list(graph.layer_names),
    }


def describe_layers(explanation: Explanation, graphs: Sequence[AttentionGraph]) -> Data:
    """The same for an explanation, which may have rows and no graph."""
    if graphs:
        return describe_graph(graphs[0])
    first = next(iter(explanation.results.values()), None)
    return describe_rows(
        len(explanation.tokens), explanation.depth, causal=first is not None and first.causal
    )


def describe_rows(size: int, depth: int, *, causal: bool) -> Data:
    """The layers of rows that have no graph."""
    window = [None] * depth
    facts = {"removed": [], "depth": depth, "size": size, "causal": causal}
    return facts | {"window": window, "layers": None}


def describe_parts(explanation: Explanation, graphs: Sequence[AttentionGraph]) -> Data | None:
    """Where the target begins that a decoder reads beside its source; None without one."""
    if not graphs or graphs[0].layer_names is None:
        return None
    graph = graphs[0]
    encoding = [
        place for place, name in enumerate(graph.layer_names or ()) if name.startswith("encoder")
    ]
    touched = np.zeros(graph.size, bool)
    for layer in encoding:  # a layer of the encoder leaves the decoder's positions as they are
        touched |= np.abs(graph.layer_edges(layer + 1) - np.eye(graph.size)).max(axis=1) > 1e-6
    if not touched.any() or touched[-1]:
        return None
    return {"target": int(np.flatnonzero(touched)[-1]) + 1}
