"""The data of the page of an `Explanation` or a `Generation`.

The page computes raw attention and rollout itself where edges are attention. The data hold all
other methods, importance, maximum flows, and what other positions read on average.
"""

from collections.abc import Sequence

import numpy as np

from attnflow.analysis.exclude import ASIDES, find_excluded
from attnflow.analysis.explain.explanation import Explanation
from attnflow.analysis.explain.summary import choose_told, phrase_explanation
from attnflow.analysis.generate.generation import Generation
from attnflow.analysis.job import MethodChoice
from attnflow.analysis.page.methods import (
    COMPUTED,
    describe_generated,
    describe_run,
    title_name,
)
from attnflow.analysis.page.pack import pack_graphs, round_numbers
from attnflow.analysis.page.picture import describe_picture
from attnflow.analysis.page.schema import (
    NumberTuple,
    Page,
    PageImportance,
    PageLayers,
    PageParts,
    Tokens,
)
from attnflow.analysis.page.tokens import describe_tokens
from attnflow.core.evenness import WORTH_A_WARNING
from attnflow.core.graph import AttentionGraph
from attnflow.core.text import show_token, show_watched
from attnflow.errors import printable
from attnflow.notices import ignore_notices

LONG = 256  # positions above which a generation's page leaves out what takes seconds there
NO_PICTURE = "The picture is not available for this input, so its grid stands alone."


def describe_explanation(explanation: Explanation) -> Page:
    """The data of an explanation's page.

    >>> import attnflow as af
    >>> page = describe_explanation(af.explain("the key to the cabinets"))
    >>> page.kind, page.first, [method.name for method in page.methods]
    ('explanation', 'relevance flow', ['relevance flow', 'raw', 'rollout', 'flow'])
    """
    runs = list(explanation.runs.values())
    graphs = {id(run.graph): run.graph for run in runs if run.graph is not None}
    graph = next(iter(graphs.values()), None)
    packed, notes = pack_graphs(explanation.captured, list(graphs.values()))
    numbers = dict(zip(graphs, range(len(graphs)), strict=True)) if packed.graphs else {}
    size = len(explanation.tokens)
    asides = find_excluded(ASIDES, size, explanation)
    tokens = describe_tokens(
        explanation.tokens, explanation.special, explanation.words, asides, explanation.segments
    )
    layers = describe_rows(size, explanation.depth, causal=bool(runs) and runs[0].result.causal)
    picture = describe_picture(explanation.picture, explanation.tokens)
    if picture is not None and picture.source is None:
        notes.append(NO_PICTURE)
    return Page(
        kind="explanation",
        text=printable(" ‖ ".join(explanation.texts)),
        model=printable(explanation.model),
        summary=printable(" ".join(phrase_explanation(explanation)[0])),
        prediction=describe_prediction(explanation.prediction),
        position=explanation.position,
        span=explanation.span or None,
        normalize=runs[0].result.normalize if runs else None,
        methods=tuple(
            describe_run(run, explanation.position, tokens, packed, numbers.get(id(run.graph)))
            for run in runs
        ),
        first=choose_told(explanation, explanation.even) or explanation.first,
        sinks=describe_sinks(explanation),
        agreement=describe_agreement(explanation, asides),
        importance=describe_importances(explanation, tokens),
        picture=picture,
        parts=find_parts(graph),
        notes=(*(() if graphs else explanation.notes), *notes),
        source=str(explanation.source),
        tokens=tokens,
        layers=layers if graph is None else describe_graph(graph),
        graphs=packed,
    )


def describe_generation(generation: Generation, plan: Sequence[MethodChoice] | None = None) -> Page:
    """The data of a generation's page.

    plan: the methods to show, each with its edges; the default of the generation if None.
    """
    size = generation.size + len(generation.tokens) - 1
    choices, left_out = choose_shown(generation, plan)
    with ignore_notices():  # the page states them itself
        results = [
            generation.by({choice.method: choice.compute}, edges=choice.edges) for choice in choices
        ]
    kinds = list(dict.fromkeys(choice.edges for choice in (*choices, *left_out)))
    layers = describe_rows(size, len(results[0].layers), causal=True)
    graphs: list[AttentionGraph] = []
    if "attention" in generation.graphs:
        attention = generation.graphs["attention"]
        layers = describe_graph(attention)
        # edges that watch a token have a graph per token, whose paths are not drawn
        graphs = [generation.graphs.get(kind, attention) for kind in kinds]
    packed, too_large = pack_graphs(generation.captured, graphs)
    names = (*generation.prompt, *generation.tokens)
    tokens = describe_tokens(
        names,
        [token in generation.special for token in names],
        None,
        find_excluded(ASIDES, generation.size, generation),
        generation.segments,
        breaks=(generation.size,),
    )
    source = results[-1].source
    return Page(
        kind="generation",
        text=printable(generation.text),
        model=printable((source and source.model) or ""),
        summary=printable(generation.summary()),
        prediction=None,
        prompt=generation.size,
        position=generation.size - 1,
        probabilities=round_numbers(generation.probabilities),
        normalize=None,
        methods=tuple(
            describe_generated(result, choice, tokens, packed, graphs, kinds.index(choice.edges))
            for result, choice in zip(results, choices, strict=True)
        ),
        first=choose_first_name([result.method for result in results]),
        sinks=tuple(sink for sink in describe_sinks(generation) if sink[0] < generation.size),
        agreement={},
        importance=(),
        picture=None,
        parts=None,
        notes=(*generation.notes, *too_large, *map(describe_left_out, left_out)),
        source=str(graphs[0].source if graphs else source),
        tokens=tokens,
        layers=layers,
        graphs=packed,
    )


def choose_shown(
    generation: Generation, plan: Sequence[MethodChoice] | None
) -> tuple[list[MethodChoice], list[MethodChoice]]:
    """The methods that a page shows; and those left out by default, which would take too long."""
    if plan is not None:
        return list(plan), []
    choices = generation.plan()
    if generation.size + len(generation.tokens) - 1 <= LONG:
        return list(choices), []
    left_out = [choice for choice in choices if choice.compute not in COMPUTED]
    return [choice for choice in choices if choice.compute in COMPUTED], left_out


def describe_left_out(choice: MethodChoice) -> str:
    """The note on a method that takes too long for this page."""
    title, _ = title_name(choice.name)
    return (
        f"{title} is left out of this page above {LONG} tokens;"
        f" generation.by({choice.method!r}, edges={choice.edges!r}) computes it."
    )


def choose_first_name(names: Sequence[str]) -> str:
    """The method that the page of a generation shows first: rollout, or the one on other edges."""
    return "rollout" if names[0] == "raw" and "rollout" in names else names[0]


def describe_prediction(prediction: tuple[str, float] | None) -> tuple[str, float] | None:
    """The prediction with its label as it is shown, which for a language model is a token."""
    return None if prediction is None else (show_token(prediction[0]), prediction[1])


def describe_sinks(found: Explanation | Generation) -> tuple[tuple[int, float], ...]:
    """The sinks with their shares."""
    return tuple((sink.position, round(sink.share, 4)) for sink in found.sinks)


def describe_agreement(explanation: Explanation, asides: Sequence[int]) -> dict[str, float]:
    """The rank correlations with blank-out, if there are enough tokens to rank."""
    few = len(explanation.tokens) - len(asides) < WORTH_A_WARNING[1]
    return {} if few else {name: round(rho, 4) for name, rho in explanation.agreement.items()}


# ---- importance ---------------------------------------------------------------------------------


def describe_importances(explanation: Explanation, tokens: Tokens) -> tuple[PageImportance, ...]:
    """The importances of an explanation."""
    return tuple(
        PageImportance(
            name=name,
            title=title_name(name)[0],
            meaning=title_name(name)[1],
            target=show_watched(importance.target),
            probability=importance.probability,
            score=importance.score,
            signed=importance.signed,
            values=round_numbers(importance.values),
            words=describe_words(explanation, name, tokens),
        )
        for name, importance in explanation.importance.items()
    )


def describe_words(explanation: Explanation, name: str, tokens: Tokens) -> NumberTuple | None:
    """The importance of each word; summed over the tokens of words that were not scored."""
    scored = explanation.word_importance.get(name)
    if scored is None or scored.groups is None:
        return None
    known = {
        group.positions: value for group, value in zip(scored.groups, scored.values, strict=True)
    }
    single = explanation.importance[name].values
    return round_numbers(
        known.get(word, float(single[list(word)].sum())) for word in tokens.units.word
    )


# ---- layers -------------------------------------------------------------------------------------


def describe_graph(graph: AttentionGraph) -> PageLayers:
    """The layers of a graph, and which keys a query sees in them."""
    return PageLayers(
        removed=tuple(graph.removed),
        depth=graph.depth,
        size=graph.size,
        causal=graph.causal,
        window=tuple(graph.window),
        layers=None if graph.layer_names is None else tuple(graph.layer_names),
    )


def describe_rows(size: int, depth: int, *, causal: bool) -> PageLayers:
    """The layers of rows without a graph."""
    window = (None,) * depth
    return PageLayers(removed=(), depth=depth, size=size, causal=causal, window=window, layers=None)


def find_parts(graph: AttentionGraph | None) -> PageParts | None:
    """The target of an encoder-decoder, which follows its source; None for other models."""
    if graph is None or graph.layer_names is None:
        return None
    touched = np.zeros(graph.size, bool)
    for layer, name in enumerate(graph.layer_names, start=1):
        if name.startswith("encoder"):  # decoder positions keep to themselves
            touched |= np.abs(graph.layer_edges(layer) - np.eye(graph.size)).max(axis=1) > 1e-6
    if not touched.any() or touched[-1]:
        return None
    return PageParts(target=int(np.flatnonzero(touched)[-1]) + 1)
