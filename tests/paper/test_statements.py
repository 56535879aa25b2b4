"""What the paper says in words: how each statement is measured and judged, and the command."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import rankdata

import attnflow as af
from attnflow.analysis.statistics import bootstrap, bootstrap_runs
from attnflow.cli import commands
from attnflow.core.arrays import Floats
from attnflow.paper import judging, statements
from attnflow.paper.judging import judge, judge_pronouns, judge_statements
from attnflow.paper.pictures import PICTURED_SENTENCES, PRONOUNS, REFERENTS
from attnflow.paper.runs import (
    choose_importance,
    choose_sentences,
    evaluate_models,
    load_seeds,
    summarise_runs,
)
from attnflow.paper.statements import STATEMENTS, Evidence, PaperMeans, Statement
from tests.paper.test_paper import pronouns  # noqa: F401  # a fixture

COUNT = 6


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    models = load_seeds("verb-number", "statements")
    chosen, _ = choose_sentences([], COUNT)
    against = choose_importance("blank_out") | choose_importance("input_gradient")
    return Evidence(models, evaluate_models(models, chosen, against))


# ---- intervals -----------------------------------------------------------------------------------


def test_an_interval_of_one_run_is_that_over_its_examples() -> None:
    values = np.random.default_rng(0).normal(size=(1, 80))
    assert bootstrap_runs(values) == bootstrap(values[0])
    values[0, 3] = np.nan
    assert bootstrap_runs(values) == bootstrap(np.delete(values[0], 3))


def test_an_interval_over_runs_has_the_variance_of_both() -> None:
    """Of a mean over runs and examples: that of runs by their number, and that of examples."""
    rng = np.random.default_rng(1)
    runs, examples = rng.normal(size=(30, 1)), rng.normal(size=(1, 200))
    low, high = bootstrap_runs(runs + examples, resamples=4000)
    deviation = np.sqrt(runs.var() / 30 + examples.var() / 200)
    assert (high - low) / 3.92 == pytest.approx(deviation, rel=0.1)
    assert low < runs.mean() + examples.mean() < high


def test_undefined_values_do_not_count() -> None:
    values = np.array([[1.0, np.nan, 1.0], [np.nan, 1.0, 1.0]])
    mean = summarise_runs(values)
    assert (mean.value, mean.low, mean.high) == (1.0, 1.0, 1.0)
    assert np.isnan(summarise_runs(np.full((2, 2), np.nan)).value)


# ---- verdicts ------------------------------------------------------------------------------------


def spread_around(mean: float, models: int = 2) -> Floats:
    return np.tile(mean + np.array([-0.5, 0.5] * 50), (models, 1))


@pytest.mark.parametrize(
    ("means", "below", "expected"),
    [
        ([0.3], False, "held"),
        ([-0.3], False, "not held"),
        ([0.02], False, "open"),
        ([0.3], True, "not held"),
        ([-0.3], True, "held"),
        ([0.3, 0.5], False, "held"),
        ([0.3, 0.02], False, "open"),
        ([0.3, 0.02, -0.3], False, "not held"),
    ],
)
def test_a_statement_holds_if_all_intervals_are_beyond_its_bound(
    means: list[float], below: bool, expected: str
) -> None:
    statement = Statement("it is so", "above 0", 0.0, below=below)
    parts = {f"part {mean}": spread_around(mean) for mean in means}
    found = judge(statement, parts)
    weakest = max(means) if below else min(means)
    assert (found.verdict, found.part) == (expected, f"part {weakest}")
    assert str(found).startswith(f"{expected}: {weakest:.2f} [")


def test_models_that_disagree_leave_a_label_open() -> None:
    statement = Statement("yes", "plural", 0.5, labels=True)
    answers = {"all": [1, 1, 1], "some": [1, 0, 1], "none": [0, 0, 0]}
    shown = [
        str(judge(statement, {"": np.array(each, dtype=float)[:, None]}))
        for each in answers.values()
    ]
    assert shown == ["held", "open, 2 of 3 models", "not held"]


def test_the_papers_own_means_meet_every_bound() -> None:
    correlated = [each for each in STATEMENTS if each.correlated is not None]
    assert len(correlated) == 9
    for each in correlated:
        assert each.correlated is not None
        assert judge(each, each.correlated(PaperMeans())).verdict == "held", each.says


def test_every_statement_is_measured_in_one_way_and_said_once() -> None:
    assert all((each.measure is None) != (each.correlated is None) for each in STATEMENTS)
    assert len({each.says for each in STATEMENTS}) == len(STATEMENTS)


# ---- what is measured ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::attnflow.SaturationWarning")
def test_entropy_residual_and_spread_are_those_of_the_captured_attention(
    evidence: Evidence,
) -> None:
    model = evidence.models[0]
    texts = [str(example.text) for example in evidence.runs.first.examples]
    faded = statements.fade_residual(evidence)
    for place, attention in enumerate(af.capture(model, texts)):
        for layer, entropies in evidence.entropies.items():
            row = attention.weights[layer - 1].mean(axis=0)[0]
            expected = -(row * np.log(row)).sum() / np.log(len(row))
            assert entropies[0, place] == pytest.approx(expected, abs=1e-5)
        graph = attention.graph()
        for method in (af.rollout, af.flow):
            result = method(graph, layers=[1, 6], positions=[0])
            own = result.at(0, 6)[0] / result.at(0, 1)[0]
            assert faded[method.__name__][0, place] == pytest.approx(own, abs=1e-5)
            words = result.at(0, 6)[1:] / result.at(0, 6)[1:].sum()
            even = 1 / len(words)
            spread = np.abs(words - even).sum() / 2 / (1 - even)
            assert evidence.spread(method.__name__)[0, place] == pytest.approx(spread, abs=1e-5)


def test_cls_outranks_every_word_in_layer_1_and_its_rank_is_spearmans(evidence: Evidence) -> None:
    for method in ("rollout", "flow"):
        assert (evidence.outrank(method, 1) == 1).all()  # half of the row is its residual
    for place, example in enumerate(evidence.runs.first.examples):
        scores = example.importance["blank_out"]
        below = (rankdata(scores)[0] - 1) / (len(scores) - 1)
        assert evidence.outrank_by_importance("blank_out")[0, place] == pytest.approx(below)


def test_layer_1_is_as_the_paper_says_by_construction(evidence: Evidence) -> None:
    for measure in (statements.compare_first_layers, statements.compare_residual):
        (values,) = measure(evidence).values()
        assert values.max() < 1e-6


def test_correlations_are_the_reports_with_and_without_cls(evidence: Evidence) -> None:
    for special in (True, False):
        chosen = Evidence(evidence.models, evidence.runs, special)
        report = evidence.runs.first.including(special)
        lead = statements.lead_over_raw(chosen, "blank_out")["flow"][0]
        expected = report.values("flow", "blank_out")[5] - report.values("raw", "blank_out")[5]
        np.testing.assert_array_equal(lead, expected)
        over = statements.lead_over_rollout(chosen, "input_gradient")[""][0]
        gaps = [report.values(name, "input_gradient")[1:] for name in ("flow", "rollout")]
        np.testing.assert_allclose(over, (gaps[0] - gaps[1]).mean(axis=0))


def test_a_words_prominence_is_its_weight_by_the_mean_of_the_words(evidence: Evidence) -> None:
    text = PICTURED_SENTENCES[1]
    found = af.explain(text, edges="attention", importance=())
    weights = found.rollout.at(0)
    place = found.tokens.index("systems")
    expected = weights[place] / weights[1:].mean()
    assert evidence.prominence(text, "systems", "rollout") == pytest.approx(expected)
    assert evidence.predictions(text) == [af.load("verb-number").predict([text])[0][0]]


def test_pronouns_fit_where_the_mask_weighs_whom_the_likelier_word_means(
    pronouns: Path,  # noqa: F811
) -> None:
    judged = list(judge_pronouns(str(pronouns)))
    model = af.load(pronouns)
    wanted = ({"rollout", "flow"}, {"flow"})
    for each, text, referents, methods in zip(judged, PRONOUNS, REFERENTS, wanted, strict=True):
        chances = {word: af.blank_out(model, text, word).probability for word in ("his", "her")}
        likely, other = sorted(chances, key=lambda word: -chances[word])
        found = af.explain(text, model=model, edges="attention", importance=())
        places = [found.tokens.index(referents[word]) for word in (likely, other)]
        fitting = set()
        for name in ("raw", "rollout", "flow"):
            first, second = found.results[name].at(found.position)[places]
            fitting |= {name} if first > second else set()
        assert each.verdict.verdict == ("held" if fitting == methods else "not held")
        assert each.verdict.part.startswith(f"{likely} ")


# ---- the command ---------------------------------------------------------------------------------


def test_seeds_share_a_column_and_the_paper_has_its_own() -> None:
    found = judge_statements(["verb-number", "verb-number,verb-number"], limit=4, command="x")
    columns = {each.models for each in found.judged}
    assert columns == {"the paper", "verb-number", "verb-number,verb-number"}
    assert len(found.judged) == 2 * (12 + 2 * 9) + 9
    means = {name: [mean.value for mean in row] for name, row in found.entropies.items()}
    np.testing.assert_allclose(means["verb-number"], means["verb-number,verb-number"])
    assert {name for name, _ in found.ranks} == {"verb-number", "verb-number,verb-number"}
    assert found.ranks["verb-number", "flow"][0].value == 1.0
    assert "n = 4" in found.to_markdown()


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["attnflow", "reproduce", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    return int(ended.value.code or 0)


def test_the_command_writes_what_it_prints(
    pronouns: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--model", "verb-number", "--limit", 3, "--masked-lm", pronouns]
    assert call(monkeypatch, "statements", *options) == 0
    shown = capsys.readouterr().out
    assert (tmp_path / "statements.md").read_text().strip() == shown.strip()
    for each in STATEMENTS:
        assert f"| {each.says} | {each.criterion} |" in shown
    rows = list(csv.DictReader((tmp_path / "statements.csv").read_text().splitlines()))
    assert {row["verdict"] for row in rows} <= {judging.HELD, judging.OPEN, judging.NOT_HELD}
    assert [row["models"] for row in rows[-2:]] == [str(pronouns)] * 2
    assert (
        f"attnflow reproduce statements --model verb-number --limit 3 --masked-lm {pronouns}"
        in shown
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "{pronouns}"], "statements is of a verb-number model"),
        (["--model", ""], "statements needs a verb-number model; got ''"),
        (["--side", "both"], "unknown side 'both'; choose from test, dev, train, all"),
        (["--data", "missing"], "does not exist"),
        (["--out", "no/such"], "does not exist"),
        (["--limit", "1", "--masked-lm", "verb-number"], "figure 4 needs a masked LM"),
    ],
)
def test_bad_input_to_the_statements_is_one_line(
    options: list[str],
    message: str,
    pronouns: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [option.format(pronouns=pronouns) for option in options]
    if "--model" not in given:
        given += ["--model", "verb-number"]
    assert call(monkeypatch, "statements", *given) == 2
    shown = capsys.readouterr()
    lines = [
        line
        for line in (shown.out + shown.err).splitlines()
        if line and not line.startswith("Loading weights")
    ]
    assert len(lines) == 1
    assert message in lines[0]
    assert not list(tmp_path.iterdir())
