"""`Job`: the options of an analysis, read and checked in one place.

`explain`, `evaluate`, `generate`, `explain_corpus` and the command line each make a `Job` before a
model is loaded. `Job.plan` gives the methods and edges to compute for one model.
"""

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from attnflow.analysis.faithfulness.faithfulness import Measurement, choose_value
from attnflow.analysis.faithfulness.metrics import BINS
from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.importance.importances import IMPORTANCES, PAPER_IMPORTANCES
from attnflow.capturing.backward import TargetOrPair, read_foil
from attnflow.core.attention import Attention
from attnflow.core.checks import (
    Numbers,
    check_count,
    check_flag,
    check_integers,
    check_residual,
    is_integer,
)
from attnflow.core.choices import Choices, Method, call_own, read_choices, read_methods
from attnflow.core.graph import RESIDUAL, AttentionGraph
from attnflow.core.methods import METHODS, flow
from attnflow.core.request import check_normalize
from attnflow.edges.edge_weight import EDGES, EdgeWeight, name_result, read_edges
from attnflow.edges.graphs import drop_attention, refuse_residual
from attnflow.errors import OptionError
from attnflow.models.answers import AnswerText, check_answer, check_answer_foil, refuse_beside
from attnflow.models.attention_weights import check_heads
from attnflow.models.model import Model
from attnflow.models.predict import Foil, FoilNumber, check_contrast, number_foil
from attnflow.models.segments import KINDS

GraphMaker = Callable[[Attention], AttentionGraph]
ImportanceFunction = Callable[..., list[Importance]]
IMPORTANCE_FORM = "f(model, inputs, target) -> list[Importance]"
Position = int | Literal["focal", "max", "mean"]
POSITIONS: tuple[Literal["focal", "max", "mean"], ...] = ("focal", "max", "mean")
TEXT_SEGMENTS = tuple(kind for kind in KINDS if kind != "turns")  # a text has no turns
ATTENTION = {"attention": EDGES["attention"]}
LayersChoice = tuple[int, ...] | Mapping[str, tuple[int, ...]]  # of all results, or by result

# Computed first if neither methods nor edges are named, by kind of model. Chosen by measurement on
# half of the texts and reported on the other half: for decoders by the rank of the true token
# (docs/truth.md), for classifiers by faithfulness and by the noun that decides. A model that
# predicts nothing has no target for gradients, and was not measured.
FIRST = {
    "decoder": ("relevance", "rollout"),
    "encoder": ("relevance", "flow"),
    "no prediction": ("contribution", "rollout"),
}
# gradients would take a forward and a backward pass per generated token
FIRST_WHILE_GENERATING = ("contribution", "rollout")


@dataclass(frozen=True)
class MethodChoice:
    """One method on one kind of edges."""

    edges: str
    method: str
    compute: Method

    @property
    def name(self) -> str:
        """The name of its result."""
        return name_result(self.edges, self.method)


@dataclass(frozen=True)
class Plan:
    """The methods and edges that a job means for one model.

    Parameters
    ----------
    choices
        The methods, each with its edges, in the order in which they are computed.
    weights
        The edge weights by name.
    first
        The edges that come first by default; they are left out, with a note, where they are not
        available for the model. None where methods or edges were named.
    """

    choices: tuple[MethodChoice, ...]
    weights: Mapping[str, EdgeWeight]
    first: str | None = None

    @classmethod
    def make(
        cls,
        methods: Mapping[str, Method],
        weights: Mapping[str, EdgeWeight],
        first: tuple[str, str] | None = None,
    ) -> "Plan":
        """Every method on all edges; before them one method on the edges that come first.

        By default, edges that may be negative are for rollout: a capacity is not negative.
        """
        choices = tuple(
            MethodChoice(edges, name, method)
            for edges, weight in weights.items()
            for name, method in methods.items()
            if not (methods is METHODS and method is flow and weight.carry is not None)
        )
        if first is None:
            return cls(choices, dict(weights))
        edges, name = first
        choice = MethodChoice(edges, name, METHODS[name])
        return cls((choice, *choices), {edges: EDGES[edges], **weights}, edges)

    def by_edges(self) -> dict[str, list[MethodChoice]]:
        """The choices of each kind of edges."""
        return {
            edges: [choice for choice in self.choices if choice.edges == edges]
            for edges in self.weights
        }

    def drop_first(self) -> "Plan":
        """The same without the edges that come first by default."""
        weights = {name: weight for name, weight in self.weights.items() if name != self.first}
        kept = tuple(choice for choice in self.choices if choice.edges != self.first)
        return Plan(kept, weights)


@dataclass(frozen=True, eq=False)
class Job:
    """The options of an analysis, checked.

    Parameters
    ----------
    methods, edges, importance
        By name; None stands for the default.
    first
        The edges and the method of a result that is computed before these methods on these edges.
    layers
        Those to compute, for all results or by result; all if None.
    position
        The explained position: "focal" is where the prediction comes from; "max" and "mean" are
        taken over all positions.
    target, foil
        The class (for language models: the token) that importance and gradients watch, the
        prediction if None; and the one that it is contrasted with, by the difference of logits.
    heads
        How heads are fused while capturing; None keeps every head.
    graph
        A user-defined function from an `Attention` to an `AttentionGraph`.
    residual, without
        Options of the attention graph.
    normalize
        How methods normalise rows.
    segments
        Parts of a text ("sentences", "lines" or "words") whose shares are computed instead of the
        scores of tokens.
    faithfulness, replacement
        What is measured by perturbing inputs, and what replaces the tokens that are taken out; None
        if nothing is measured.
    truncation
        Whether inputs that are too long are cut.
    workers
        Threads for attention flow.
    everywhere
        Whether to compute rows of all positions where that is cheap, not of the explained one
        alone.
    by_word
        Whether importance is also given by word, and blank-out with its sign.
    answer
        The answer of a causal language model that is explained instead of one position: a text or
        token ids; `foil` is then another answer.
    span
        Positions that are explained together, instead of one.
    """

    methods: Mapping[str, Method] | None = None
    edges: Mapping[str, EdgeWeight] | None = None
    importance: Mapping[str, ImportanceFunction] | None = None
    first: tuple[str, str] | None = None
    layers: LayersChoice | None = None
    position: Position = "focal"
    target: int | str | None = None
    foil: Foil | None = None
    heads: str | None = "mean"
    graph: GraphMaker | None = None
    residual: float | None = None
    without: tuple[int, ...] = ()
    normalize: str | None = "sum"
    segments: str | None = None
    faithfulness: Measurement | None = None
    replacement: object = None
    truncation: bool = False
    workers: int = 1
    everywhere: bool = False
    by_word: bool = False
    answer: AnswerText | None = None
    span: tuple[int, ...] | None = None

    @classmethod
    def read(
        cls,
        *,
        methods: Choices | None = None,
        edges: Choices | None = None,
        importance: Choices | None = None,
        layers: Numbers | Mapping[str, Numbers] | None = None,
        position: object = None,
        target: TargetOrPair = None,
        foil: Foil | None = None,
        heads: str | None = "mean",
        graph: GraphMaker | None = None,
        residual: float | None = None,
        without: Numbers = (),
        normalize: str | None = "sum",
        segments: str | None = None,
        faithfulness: Choices | None = (),
        replacement: object = None,
        target_of: str | None = None,
        truncation: bool = False,
        workers: int = 1,
        everywhere: bool = False,
        by_word: bool = False,
        answer: AnswerText | None = None,
        span: Numbers | None = None,
    ) -> "Job":
        """Read and check all options; they are described at `Job`."""
        if everywhere and isinstance(position, str) and position != "focal":
            raise OptionError(f"one position is explained, a number or focal; got {position!r}")
        check_heads(heads)
        check_count("workers", workers)
        check_normalize(normalize)
        aim, against = (None, foil) if answer is not None else read_target(target, foil)
        job = cls(
            methods=None if methods is None else read_methods(methods),
            edges=None if edges is None else read_edges(edges),
            importance=None if importance is None else read_importances(importance),
            layers=read_layers(layers),
            position=check_position_choice(position),
            target=aim,
            foil=against,
            heads=heads,
            graph=graph,
            residual=None if residual is None else check_residual(residual),
            without=tuple(dict.fromkeys(check_integers(without, "without"))),
            normalize=normalize,
            segments=segments,
            faithfulness=read_faithfulness(
                faithfulness, choose_value(target_of, contrasts=against is not None)
            ),
            replacement=replacement,
            truncation=check_flag("truncation", truncation),
            workers=workers,
            everywhere=everywhere,
            by_word=by_word,
            answer=answer,
            span=None if span is None else tuple(check_integers(span, "span")),
        )
        job.check_span(target)
        job.check_graph()
        job.check_edges()
        job.check_segments()
        return job

    def check_graph(self) -> None:
        """Refuse a user-defined graph that is not a function, or that comes with graph options."""
        if self.graph is None:
            return
        if self.residual is not None or self.without:
            raise OptionError(
                "graph makes the whole graph, so residual and without are not used; leave them out,"
                " or have the function use them"
            )
        if not callable(self.graph):
            raise OptionError(
                "graph must be a function from an Attention to an AttentionGraph;"
                f" got {type(self.graph).__name__}"
            )

    def check_edges(self) -> None:
        """Refuse options of attention graphs for other edges."""
        if self.edges is None:
            return
        refuse_residual(self.edges, self.residual)
        others = drop_attention(self.edges)
        if others and (self.graph is not None or self.without):
            raise OptionError(
                f"graph and without make graphs of attention; got edges {', '.join(others)} as well"
            )

    @property
    def explains_span(self) -> bool:
        """Whether several positions are explained together."""
        return self.answer is not None or self.span is not None

    def check_span(self, target: TargetOrPair) -> None:
        """Refuse options that an answer, or a span of positions, does not take."""
        if not self.explains_span:
            return
        position = None if self.position == "focal" else self.position
        if self.answer is None:
            refuse_beside("span", position=position)
        else:
            refuse_beside("answer", position=position, span=self.span, target=target)
            check_answer(self.answer)
        if self.span == ():
            raise OptionError("span must have at least one position; got none")
        others = [name for name in self.importance or () if name != "relevance"]
        if others or self.own_importance:
            raise OptionError(
                f"of several tokens together relevance is the only importance; got {others}: leave"
                " it out, or give importance=['relevance']"
            )
        if self.answer is None or self.foil is None:
            return
        check_answer_foil(self.foil)
        for name, weight in (self.edges or {}).items():
            if weight.carry is not None:
                raise OptionError(
                    f"{name} edges carry shares of one answer's logits, not of the difference of"
                    " two: leave foil out, or use relevance edges"
                )

    def check_segments(self) -> None:
        """Refuse unknown segments of a text, and options that their shares do not take."""
        if self.segments is None:
            return
        if self.segments not in TEXT_SEGMENTS:
            known = ", ".join(TEXT_SEGMENTS)
            raise OptionError(
                f"unknown segments {self.segments!r}; choose from {known}", options=["segments"]
            )
        methods, edges = list(self.named_methods), list(self.edges or ())
        options = {
            "methods": (methods, methods == ["rollout"]),
            "edges": (edges, edges in ([], ["attention"])),
            "importance": (list(self.importance or ()), not self.importance),
            "graph": (self.graph, self.graph is None),
            "normalize": (self.normalize, self.normalize is not None),
        }
        for option, (given, is_allowed) in options.items():
            if not is_allowed:
                raise OptionError(
                    f"shares of segments are of rollout on attention; got {option} {given!r}:"
                    " leave it out"
                )
        if self.position in ("max", "mean"):
            raise OptionError(
                f"shares of segments are of one position; got {self.position!r}: choose focal, or a"
                " position from 0 on"
            )

    @property
    def kept_heads(self) -> str | None:
        """How heads are fused while capturing: a user-defined graph gets every head."""
        return self.heads if self.graph is None else None

    @property
    def asked_position(self) -> int | None:
        """The position by its number; None for the focal one, and for all of them."""
        return None if isinstance(self.position, str) else self.position

    def make_graph(self, attention: Attention) -> AttentionGraph:
        """The graph of attention, by the user-defined function or by the job's options."""
        if self.graph is None:
            return attention.graph(
                residual=RESIDUAL if self.residual is None else self.residual,
                without=self.without,
                heads="mean" if attention.fused else self.heads or "mean",
            )
        graph = call_own("graph", self.graph, attention)
        if not isinstance(graph, AttentionGraph):
            raise OptionError(f"graph must return an AttentionGraph; got {type(graph).__name__}")
        if graph.size != attention.size:
            raise OptionError(
                f"graph must keep all positions, {attention.size} here (without= takes some out"
                f" and keeps their numbers); got {graph.size}"
            )
        return graph

    def choose_importance(self, model: Model) -> Mapping[str, ImportanceFunction]:
        """The importances to compute, by default the references; none where not available."""
        if not model.predicts or model.is_vision or model.is_encoder_decoder:
            return {}
        default = {} if self.explains_span else PAPER_IMPORTANCES
        return default if self.importance is None else self.importance

    @property
    def own_importance(self) -> dict[str, ImportanceFunction]:
        """The user-defined importances."""
        named = self.importance or {}
        return {name: each for name, each in named.items() if each is not IMPORTANCES.get(name)}

    def plan(self, model: Model, first: tuple[str, str] | None = None) -> Plan:
        """The methods and edges to compute for a model.

        first: the edges and the method that come first if none are named; if None, they depend on
        the kind of model.
        """
        if not self.has_default_methods:
            edges = ATTENTION if self.edges is None else self.edges
            # not left out where it is not available, unlike a default
            return replace(Plan.make(self.named_methods, edges, self.first), first=None)
        return Plan.make(METHODS, ATTENTION, first or choose_first(model))

    @property
    def has_default_methods(self) -> bool:
        """Whether no option says what is computed."""
        named = self.methods is not None or self.edges is not None
        makes_graph = self.graph is not None or bool(self.without)
        return not (named or makes_graph or self.normalize == "receptive_field")

    @property
    def named_methods(self) -> Mapping[str, Method]:
        """The methods that were named; all of attnflow's if none were."""
        return METHODS if self.methods is None else self.methods

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of faithfulness."""
        return tuple(self.faithfulness.metrics) if self.faithfulness else ()

    def check_target(self, model: Model) -> tuple[int | None, FoilNumber | None]:
        """The numbers of the class to watch, None for the prediction, and of its foil, if any."""
        if self.answer is not None or (self.target is None and self.foil is None):
            return None, None
        if not model.predicts:
            given = self.target if self.foil is None else (self.target, self.foil)
            raise OptionError(
                f"a target requires a model that predicts, and {model.name} has no head that"
                f" predicts; got {given!r}: leave it out"
            )
        target = None if self.target is None else model.target(self.target)
        foil = number_foil(model, self.foil)
        check_contrast(model, target, foil)
        return target, foil


def choose_first(model: Model) -> tuple[str, str]:
    """The edges and the method that come first by default."""
    kind = "decoder" if model.is_causal else "encoder"
    return FIRST[kind if model.predicts else "no prediction"]


def describe_missing_edges(edges: str, error: Exception) -> str:
    """The note on edges that come first by default and that a model does not have."""
    return f"{edges} edges are not available for this model, so attention is shown alone: {error}"


# ---- the options, one by one ---------------------------------------------------------------------


def read_importances(chosen: Choices) -> dict[str, ImportanceFunction]:
    """Importances as {name: function}, from names, functions, or {name: function}; none for ()."""
    return read_choices(chosen, IMPORTANCES, "importance", IMPORTANCE_FORM, (None, [], None), {})


def read_target(
    target: TargetOrPair, foil: Foil | None = None
) -> tuple[int | str | None, Foil | None]:
    """The target and its foil: a pair of targets is watched by the difference of their logits."""
    if isinstance(target, tuple) and len(target) != 2:
        raise OptionError(f"a contrast is between two targets; got {len(target)}")
    if isinstance(target, tuple) and None in target:
        raise OptionError(f"a contrast is between two named targets; got {target!r}")
    pair = read_foil(target, foil)
    if not isinstance(pair, tuple):
        return pair, None
    if pair[0] is not None and pair[0] == pair[1]:
        raise OptionError(f"a contrast is between two different targets; got {pair[0]!r} twice")
    return pair


def read_faithfulness(metrics: Choices | None, target_of: object) -> Measurement | None:
    """The measurement by perturbation; None if no metric is named."""
    if metrics is None or (isinstance(metrics, Sized) and not len(metrics)):
        Measurement.read("comprehensiveness", BINS, target_of)  # which checks target_of
        return None
    return Measurement.read(metrics, BINS, target_of)


def read_layers(layers: Numbers | Mapping[str, Numbers] | None) -> LayersChoice | None:
    """Layers of all results, or by result."""
    if layers is None:
        return None
    if isinstance(layers, Mapping):
        return {name: tuple(check_integers(each, "layers")) for name, each in layers.items()}
    numbers = tuple(dict.fromkeys(check_integers(layers, "layers")))
    if not numbers:
        raise OptionError(
            f"layers must name at least one layer, or be None for all; got {layers!r}"
        )
    return numbers


def check_position_choice(position: object) -> Position:
    """The explained position: a number, or one of POSITIONS; the focal one if None."""
    if position is None:
        return "focal"
    if isinstance(position, int | np.integer) and is_integer(position):
        return int(position)
    for known in POSITIONS:
        if isinstance(position, str) and position == known:
            return known
    raise OptionError(
        f"unknown position {position!r}; choose from {', '.join(POSITIONS)}, or a number",
        options=["position"],
    )
