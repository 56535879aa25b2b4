"""Faithfulness, rationales and statistics in reports, against the functions themselves and scipy."""

import json
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau, pearsonr, rankdata

import attnflow as af
from attnflow.analysis.faithfulness import perturb
from attnflow.analysis.faithfulness.metrics import PerturbationCurve
from attnflow.analysis.importance.watch import run_variants
from attnflow.analysis.statistics import STATISTICS, dense, kendall
from tests.console import inside
from tests.families import build, word_tokenizer

LABELS = {"the key to cabinets": "singular", "the keys to the cabinet": "plural"}
EXAMPLES: list[Any] = [
    *LABELS.items(),
    "the old houses",
]
METRICS = ["comprehensiveness", "sufficiency", "deletion", "insertion", "log_odds"]


def model() -> af.Model:
    return af.load("verb-number")


def report(**options: Any) -> af.Report:
    return af.evaluate(model(), EXAMPLES, **{"layers": [1, 6], "against": "blank_out", **options})


# ---- faithfulness --------------------------------------------------------------------------------


@pytest.mark.parametrize("replacement", [None, "removal"])
def test_a_report_holds_what_faithfulness_gives_for_every_method_and_layer(
    replacement: str | None,
) -> None:
    found = report(faithfulness=METRICS, replacement=replacement, target_of="logit")
    for number, example in enumerate(EXAMPLES):
        text, label = example if isinstance(example, tuple) else (example, None)
        graph = af.capture(model(), text).graph()
        for method, compute in af.METHODS.items():
            for place, layer in enumerate((1, 6)):
                row = compute(graph, layers=[layer]).at(0)
                expected = af.faithfulness(
                    model(),
                    text,
                    row,
                    target=label,
                    metrics=METRICS,
                    replacement=replacement,
                    target_of="logit",
                )
                for metric in METRICS:
                    value = found.values(method, metric)[place, number]
                    assert value == pytest.approx(expected[metric], abs=1e-5)
    rows = [row for row in found.rows() if row[:2] == ("deletion", "flow")]
    assert [row[2] for row in rows] == [1, 6]
    assert rows[1][3] == pytest.approx(found.values("flow", "deletion")[1].mean())
    assert rows[1][5:] == (3, 0, replacement or "unknown")
    assert found.mean("flow", "deletion") == rows[1][3]


def test_the_two_further_rows_are_random_orders_and_the_best_of_all() -> None:
    metrics = [*METRICS, "normalised_comprehensiveness", "sufficiency@30"]
    found = report(faithfulness=metrics, methods="rollout", best=True)
    text, label = EXAMPLES[0]
    size = len(model().encode(text).ids) - 1
    scores = []
    for order in permutations(range(size)):
        row = np.zeros(size + 1)
        row[[place + 1 for place in order]] = range(size, 0, -1)
        scores.append(row)
    drawn = []
    for seed in range(10):
        row = np.zeros(size + 1)
        row[np.random.default_rng(seed).permutation(size) + 1] = range(size, 0, -1)
        drawn.append(row)
    options: dict[str, Any] = {"target": label, "metrics": metrics}
    all_orders = af.faithfulness(model(), [text] * len(scores), scores, **options)
    random = af.faithfulness(model(), [text] * 10, drawn, **options)
    lower = {"sufficiency", "deletion", "log_odds", "sufficiency@30"}
    for metric in metrics:
        values = [each[metric] for each in all_orders]
        best = min(values) if metric in lower else max(values)
        assert found.values("best found", metric)[0, 0] == pytest.approx(best, abs=1e-5)
        mean = np.mean([each[metric] for each in random])
        assert found.values("random order", metric)[0, 0] == pytest.approx(mean, abs=1e-5)
    assert found.list_methods("deletion") == ("rollout", "random order", "best found")
    assert found.list_methods("blank_out") == ("rollout",)


def test_a_report_runs_each_perturbed_input_once_and_tells_its_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[Any, ...]] = []

    def watch_runs(model: af.Model, variants: Any, *rest: Any) -> Any:
        ran.extend((each.encoded.ids, each.position, each.hidden) for each in variants)
        return run_variants(model, variants, *rest)

    monkeypatch.setattr(perturb, "run_variants", watch_runs)
    seen: list[af.Progress] = []
    options: dict[str, Any] = {"against": (), "replacement": ["unknown", "attention"]}
    examples = ["the key" + " to the cabinets" * number for number in range(1, 6)]
    with af.progress_listener(seen.append):
        af.evaluate(model(), examples, layers=[1, 6], faithfulness=METRICS, **options)
    assert len(ran) == len(set(ran))
    assert [each.done for each in seen if each.title == "evaluating"] == [4, 5]
    # all sets of the first words of 16 orders, taken away or kept, by two replacements: no search
    assert len(ran) < sum(16 * 2 * 2 * (2 + 3 * number) for number in range(1, 6))


def test_no_method_beats_the_best_found_of_a_long_text_either() -> None:
    text = "the old keys to the cabinets in the house near the large river"
    found = af.evaluate(
        model(),
        [text],
        layers=[6],
        against=(),
        faithfulness=["comprehensiveness@10", "insertion"],
        best=True,
    )
    for metric in ("comprehensiveness@10", "insertion"):
        best = found.values("best found", metric)[0, 0]
        for method in (*af.METHODS, "random order"):
            assert found.values(method, metric)[0, 0] <= best + 1e-9


def test_tables_name_the_replacement_and_stand_beside_the_correlations() -> None:
    found = report(
        faithfulness=["deletion", "insertion"], replacement=["unknown", "attention"], best=True
    )
    assert found.replacements == ("unknown", "attention")
    text = found.to_markdown()
    assert "| method | layer | blank_out | deletion | insertion | undefined |" in text
    assert "Faithfulness, replacement: unknown, of the probability" in text
    assert "Faithfulness, replacement: attention, of the probability" in text
    assert "lower is better: deletion" in text
    assert text.count("| random order |") == text.count("| best found |") == 2
    frame = found.to_pandas()
    assert frame.columns.tolist()[-1] == "replacement"
    assert frame[frame.against == "deletion"].replacement.unique().tolist() == [
        "unknown",
        "attention",
    ]
    assert found.to_csv().splitlines()[0].endswith("undefined,replacement,source")
    content = json.loads(found.to_json())
    first = content["examples"][0]["faithfulness"][1]
    assert first["replacement"] == "attention"
    assert first["values"]["deletion"]["raw"] == pytest.approx(
        found.values("raw", "deletion", "attention")[:, 0].tolist()
    )
    plain = report()
    assert plain.to_pandas().columns.tolist() == list(af.Report.columns)
    assert "Faithfulness" not in plain.to_markdown()


def test_curves_start_at_the_prediction_and_end_where_all_is_gone() -> None:
    found = report(faithfulness=["deletion", "insertion"])
    for example in found.examples:
        curves = example.faithful[0].curves
        assert set(curves) == {*found.methods, "random order"}
        ends = {float(round(rows[0, 0, 0], 6)) for rows in curves.values()}
        assert len(ends) == 1
        assert len({float(round(rows[0, 0, -1], 6)) for rows in curves.values()}) == 1
        for rows in curves.values():
            np.testing.assert_allclose(rows[:, 0, 0], rows[:, 1, -1], atol=1e-6)


def test_a_text_with_nothing_to_order_is_undefined_and_counted() -> None:
    found = af.evaluate(
        model(), [*EXAMPLES, "keys"], layers=[6], faithfulness="deletion", undefined="zero"
    )
    row = next(row for row in found.rows() if row[:2] == ("deletion", "rollout"))
    assert row[5:7] == (4, 1)
    assert row[3] == pytest.approx(found.values("rollout", "deletion")[0, :3].mean())


def test_user_defined_scorers_and_metrics_take_part() -> None:
    def drop(curve: PerturbationCurve) -> float:
        return float(curve.deleted[0] - curve.deleted[1])

    texts = [example if isinstance(example, str) else example[0] for example in EXAMPLES]
    found = report(
        methods=[],
        scorers={
            "exact": lambda text: af.blank_out(model(), text, LABELS.get(text)),
            "broken": [np.full(len(model().encode(text).ids), np.nan) for text in texts],
        },
        against=(),
        faithfulness={"drop": drop, "comprehensiveness": None},
        best=True,
    )
    assert [row[:3] for row in found.rows()][:4] == [
        ("drop", "exact", None),
        ("drop", "broken", None),
        ("drop", "random order", None),
        ("drop", "best found", None),
    ]
    values = {row[:2]: row for row in found.rows()}
    assert values["drop", "exact"][3] > values["drop", "random order"][3]
    assert values["drop", "broken"][5:7] == (3, 3)
    assert np.isnan(values["drop", "best found"][3])  # which end is better is unknown
    assert found.examples[2].label == model().predict([texts[2]])[0][0]


def test_positions_that_were_taken_out_of_the_graph_stay() -> None:
    found = report(faithfulness="deletion", methods="rollout", without=[1])
    sizes = [example.faithful[0].curves["rollout"].shape[-1] - 1 for example in found.examples]
    assert sizes == [len(example.tokens) - 2 for example in found.examples]


def test_decoders_are_measured_where_they_predict() -> None:
    llama = af.Model(build("llama"), word_tokenizer())
    ids = [5, 6, 7, 8, 9]
    queries: list[tuple[str | int, int]] = [("focal", 4), (2, 4)]
    for query, units in queries:
        found = af.evaluate(
            llama, [(ids, None)], methods="rollout", position=query, layers=[3], against=(),
            faithfulness="comprehensiveness", replacement="attention",
        )  # fmt: skip
        curves = found.examples[0].faithful[0].curves["rollout"]
        assert curves.shape[-1] == units + 1
        position = None if query == "focal" else 2
        row = af.rollout(af.capture(llama, ids)).at(4 if position is None else position)
        expected = af.faithfulness(
            llama, ids, row, metrics="comprehensiveness", replacement="attention", position=position
        )
        assert found.mean("rollout", "comprehensiveness") == pytest.approx(
            expected["comprehensiveness"], abs=1e-6
        )


# ---- rationales ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=10))
def test_plausibility_equals_counting_by_hand(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in pairs], float)
    marked = {place for place, (_, mark) in enumerate(pairs) if mark}
    found = af.plausibility(scores, [mark for _, mark in pairs])
    if not marked:
        assert np.isnan(list(found.values())).all()
        return
    ranked = sorted(range(len(pairs)), key=lambda place: (-scores[place], place))
    chosen = set(ranked[: len(marked)])
    precision = recall = len(chosen & marked) / len(marked)
    both = precision + recall
    assert found["token_f1"] == pytest.approx(2 * precision * recall / both if both else 0.0)
    assert found["iou"] == pytest.approx(len(chosen & marked) / len(chosen | marked))
    points = [(0.0, 1.0)]
    for threshold in sorted(set(scores), reverse=True):
        above = {place for place in range(len(pairs)) if scores[place] >= threshold}
        points.append((len(above & marked) / len(marked), len(above & marked) / len(above)))
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(points))
    assert found["auprc"] == pytest.approx(area)


def test_rationales_in_a_report_leave_special_tokens_out() -> None:
    marks = [[0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0], [1, 0, 0, 1]]
    found = report(rationales=marks, methods="rollout", against=())
    for number, (example, mark) in enumerate(zip(found.examples, marks, strict=True)):
        row = example.scores["rollout"][1]
        expected = af.plausibility(row[1:], mark[1:])
        for name, value in expected.items():
            assert found.values("rollout", name)[1, number] == pytest.approx(value)
        whole = found.including(True).values("rollout", "auprc")[1, number]
        assert whole == pytest.approx(af.plausibility(row, mark)["auprc"])
    assert "| method | layer | token_f1 | iou | auprc | undefined |" in found.to_markdown()
    assert found.to_pandas().columns.tolist() == list(af.Report.columns)


# ---- statistics ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=12))
def test_kendall_and_dense_equal_scipy(pairs: list[tuple[int, int]]) -> None:
    scores, importance = np.array(pairs, float).T
    found = kendall(scores[None], importance)[0], dense(scores[None], importance)[0]
    if len(set(scores)) == 1 or len(set(importance)) == 1:
        assert np.isnan(found).all()
        return
    assert found[0] == pytest.approx(kendalltau(scores, importance).statistic, abs=1e-12)
    ranks = rankdata(scores, "dense"), rankdata(importance, "dense")
    assert found[1] == pytest.approx(pearsonr(*ranks).statistic, abs=1e-12)


def test_undefined_correlations_are_dropped_or_zero_as_said() -> None:
    def flat(text: str) -> list[float]:
        count = len(model().encode(text).ids)
        return [1.0] * count if "old" in text else list(range(count))

    for statistic, compute in {"kendall": kendall, "dense": dense}.items():
        means = {}
        for undefined in ("drop", "zero"):
            found = report(methods=[], scorers=flat, statistic=statistic, undefined=undefined)
            ((_, _, _, means[undefined], _, examples, missing),) = found.rows()
            assert (examples, missing) == (3, 1)
        values = [
            compute(each.scores["flat"][:, 1:], each.importance["blank_out"][1:])[0]
            for each in found.examples[:2]
        ]
        assert means["drop"] == pytest.approx(np.mean(values))
        assert means["zero"] == pytest.approx(np.sum(values) / 3)
        assert "undefined correlations count as 0" in found.to_markdown()
    assert "Spearman correlation of dense ranks with blank_out" in found.to_markdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faithfulness": "fidelity"}, "unknown metric 'fidelity'"),
        ({"faithfulness": "deletion", "replacement": "mask"}, "needs a token of its own"),
        ({"faithfulness": "deletion", "replacement": ["unknown", None]}, "each once"),
        ({"faithfulness": "deletion", "replacement": []}, "one or several"),
        ({"faithfulness": "deletion", "target_of": "odds"}, "unknown target_of='odds'"),
        ({"statistic": "pearson"}, "unknown statistic 'pearson'; choose from spearman, kendall"),
        ({"undefined": "nan"}, "unknown undefined='nan'; choose from drop, zero"),
        ({"best": True}, "best adds a row to the metrics of faithfulness; got best=True without"),
        ({"rationales": [[0, 1]]}, "one per example, 3 here; got 1"),
        ({"rationales": 3}, "one per example, 3 here; got int"),
        ({"rationales": [[0]] * 3}, r"rationale of example 1 must be 0 or 1 per token, 5 here"),
        ({"rationales": [[0, 0, 2, 0, 0]] * 3}, "must be 0 or 1 per token; got 2"),
        ({"against": ()}, "at least one importance is needed"),
    ],
)
def test_what_a_report_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        report(**options)
    assert "\n" not in str(error.value)


def test_plausibility_refuses_what_does_not_fit() -> None:
    for scores, rationale, message in [
        ([0.1, 0.2], [1], r"rationale must be 0 or 1 per token, 2 here; got shape \(1,\)"),
        ([0.1, np.nan], [1, 0], "scores must be one finite number per token"),
        ([[0.1, 0.2]], [1, 0], r"got shape \(1, 2\)"),
        ("abc", [1], "real numbers"),
    ]:
        with pytest.raises(af.OptionError, match=message):
            af.plausibility(scores, rationale)


def test_the_command_measures_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "texts.tsv"
    file.write_text("the key to cabinets\tsingular\nthe old keys\tplural\n")
    command = ["evaluate", "verb-number", str(file), "--layers", "6", "--against", "blank_out"]
    options = ["--faithfulness", "comprehensiveness@20,deletion", "--replacement"]
    found = inside(monkeypatch, *command, *options, "unknown,removal", "--differences", "--best")
    assert found == 0
    shown = capsys.readouterr().out
    assert "| method | layer | blank_out | comprehensiveness@20 | deletion | undefined |" in shown
    assert "| deletion | unknown | removal |" in shown
    assert "| best found |" in shown
    assert "by Holm over 18 comparisons" in shown
    assert inside(monkeypatch, *command, *options[:2], "--target-of", "odds") == 2
    assert "unknown --target-of odds" in capsys.readouterr().err


def test_scores_that_agree_to_nine_digits_of_the_largest_are_equal() -> None:
    importance = np.arange(3.0)
    for size in (1.0, 1e-6, 1e6):
        equal, near, apart = size * np.array([[5e-1, 5e-1 + gap, 1] for gap in (0, 3e-10, 3e-9)])
        for statistic in STATISTICS.values():
            found = statistic(np.stack([equal, near, apart]), importance)
            assert found[0] == found[1] < found[2]
