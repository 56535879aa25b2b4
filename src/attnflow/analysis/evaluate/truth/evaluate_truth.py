"""Methods, importances and scorers judged by prompts whose true token is known."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from attnflow.analysis.evaluate.examples import Example, read_foils
from attnflow.analysis.evaluate.scorers import Scorer, Scorers, read_scorers, run_scorer
from attnflow.analysis.evaluate.truth.ranks import Positions1D, TruthRank, list_ranked, rank_truth
from attnflow.analysis.evaluate.truth.truth_prompts import TruthPrompt, TruthPrompts
from attnflow.analysis.evaluate.truth.truth_report import RankedPrompt, TruthReport
from attnflow.analysis.importance.importances import IMPORTANCES
from attnflow.analysis.job import Job
from attnflow.analysis.run import (
    Case,
    GraphMade,
    ImportanceReady,
    ResultReady,
    describe_graphs,
    run,
)
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.choices import Choices
from attnflow.core.graph import AttentionGraph
from attnflow.core.provenance import Source
from attnflow.errors import OptionError
from attnflow.models.model import Model
from attnflow.models.predict import Foil, RunnerUp
from attnflow.progress import progress_bar

PROMPTS_TOGETHER = 8
RANDOM_ORDERS = 20
LATER, EARLIER, RANDOM_ORDER = "later tokens first", "earlier tokens first", "random order"
ORDERS = (LATER, EARLIER, RANDOM_ORDER)


def evaluate_truth(
    model: Model,
    prompts: TruthPrompts,
    *,
    methods: Choices | None,
    edges: Choices | None,
    against: Choices | None,
    scorers: Scorers | None,
    limit: int | None,
    foil: Foil | Sequence[Foil] | None,
    residual: float | None,
    workers: int,
) -> TruthReport:
    """The report on prompts with known truth; options as in `evaluate`."""
    chosen = prompts.prompts if limit is None else prompts.prompts[: check_count("limit", limit)]
    same, foils = read_foils(foil, len(chosen))
    job = Job.read(
        methods=methods,
        edges=edges,
        importance=tuple(IMPORTANCES) if against is None else against,
        residual=residual,
        workers=workers,
    )
    if model.depth is not None:
        job = replace(job, layers=(model.depth,))
    scored = read_scorers(scorers, len(chosen))
    return TruthEvaluation(model, job, scored).run(chosen, [same or each for each in foils])


def refuse_options(**options: tuple[object, object]) -> None:
    """Refuse options of other evaluations, each with its default, unless they have it."""
    for option, (given, default) in options.items():
        if given is not default and given != default:
            raise OptionError(
                "prompts with known truth are judged by the rank of their true token; got"
                f" {option}={given!r}: leave it out",
                options=[option],
            )


@dataclass(eq=False)
class TruthEvaluation:
    """What is computed for each prompt, and the time that each part took."""

    model: Model
    job: Job
    scorers: Mapping[str, Scorer]
    seconds: dict[str, float] = field(default_factory=dict)
    source: Source | None = None

    def run(self, prompts: Sequence[TruthPrompt], foils: Sequence[Foil | None]) -> TruthReport:
        """The report on all prompts, or on those that were done before an interruption."""
        done: list[RankedPrompt] = []
        with progress_bar("evaluating") as tick:
            try:
                for start in range(0, len(prompts), PROMPTS_TOGETHER):
                    part = slice(start, start + PROMPTS_TOGETHER)
                    done += self.rank(prompts[part], foils[part], start)
                    tick(len(done), len(prompts))
            except KeyboardInterrupt:
                if not done:
                    raise
        names = tuple(done[0].ranks)
        return TruthReport(
            self.model.name, names, tuple(done), len(prompts), self.seconds, self.source
        )

    def rank(
        self, prompts: Sequence[TruthPrompt], foils: Sequence[Foil | None], start: int
    ) -> list[RankedPrompt]:
        """The ranks of a few prompts. start: the number of the first one."""
        scores = self.score(prompts, foils)
        ranked = []
        for place, (prompt, foil, found) in enumerate(zip(prompts, foils, scores, strict=True)):
            example = Example(start + place, prompt.text, None, prompt.encoded, prompt.target)
            for name, scorer in self.scorers.items():
                begun = time.perf_counter()
                found[name] = run_scorer(name, scorer, example)
                self.count(name, time.perf_counter() - begun)
            ranks = rank_all(prompt, found, start + place)
            against = "runner-up" if isinstance(foil, RunnerUp) else foil
            named = None if against is None else str(against)
            if isinstance(foil, int):
                named = self.model.label(foil)
            ranked.append(
                RankedPrompt(
                    prompt.family, prompt.text, prompt.answer, named, prompt.distance, ranks
                )
            )
        return ranked

    def score(
        self, prompts: Sequence[TruthPrompt], foils: Sequence[Foil | None]
    ) -> list[dict[str, Floats]]:
        """[token] of each prompt by every method and importance."""
        found: list[dict[str, Floats]] = [{} for _ in prompts]
        graphs: dict[str, AttentionGraph] = {}
        cases = [
            Case(prompt.text, prompt.encoded, prompt.target, foil)
            for prompt, foil in zip(prompts, foils, strict=True)
        ]
        for event in run(self.model, cases, self.job):
            match event:
                case GraphMade() if event.number == 0:
                    graphs[event.edges] = event.graph
                case ResultReady():
                    result = event.run.result
                    found[event.number][event.run.name] = result.values[-1, -1]
                    self.count(event.run.name, event.seconds)
                case ImportanceReady():
                    found[event.number][event.name] = np.asarray(event.importance)
                    self.count(event.name, event.seconds)
        self.source = self.source or describe_graphs(graphs)
        return found

    def count(self, part: str, seconds: float) -> None:
        """Add to the time of a part."""
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds


def rank_all(prompt: TruthPrompt, scores: Mapping[str, Floats], seed: int) -> dict[str, TruthRank]:
    """The ranks by all scores of a prompt, and by the orders to compare with."""
    ranked = list_ranked(prompt.encoded)
    places = np.arange(len(prompt.encoded.tokens), dtype=np.float64)
    rows = {**scores, LATER: places, EARLIER: -places}
    ranks = {
        name: rank_truth(values, ranked, prompt.value, prompt.keys) for name, values in rows.items()
    }
    ranks[RANDOM_ORDER] = rank_at_random(prompt, ranked, seed)
    return ranks


def rank_at_random(prompt: TruthPrompt, ranked: Positions1D, seed: int) -> TruthRank:
    """The mean over random orders."""
    rng = np.random.default_rng(seed)
    drawn = [
        rank_truth(rng.random(len(prompt.encoded.tokens)), ranked, prompt.value, prompt.keys)
        for _ in range(RANDOM_ORDERS)
    ]
    return TruthRank(*np.mean(drawn, axis=0).tolist())
