"""Paired differences against counting by hand and scipy, and the agreement of replacements."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau, permutation_test, spearmanr

import attnflow as af
from attnflow.analysis.statistics import correct_family, find_p_value

TEXTS = [
    "the key to the cabinets",
    "the old keys",
    "the men near the house",
    "the house of the men",
    "the boys that the girl likes",
    "the river near the old towns",
]
WAYS = ["unknown", "attention"]


@pytest.fixture(scope="module")
def report() -> af.Report:
    def flat(text: str) -> list[float]:
        count = len(af.load("verb-number").encode(text).ids)
        return [1.0] * count if "old" in text else list(range(count))

    return af.evaluate(
        af.load("verb-number"),
        TEXTS,
        methods=["raw", "rollout"],
        layers=[1, 6],
        against=["blank_out"],
        scorers={"flat": flat},
        faithfulness=["comprehensiveness", "deletion"],
        replacement=WAYS,
    )


# ---- the test ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-4, 4), min_size=1, max_size=7))
def test_p_values_equal_all_changes_of_sign(numbers: list[int]) -> None:
    values = np.array(numbers, float)
    ways = [abs(np.dot(signs, values)) for signs in product((1, -1), repeat=len(values))]
    expected = np.mean([way >= abs(values.sum()) for way in ways])
    assert find_p_value(values) == pytest.approx(expected)
    theirs = permutation_test(
        (values,), np.mean, permutation_type="samples", n_resamples=10_000
    ) if len(values) > 1 else None  # fmt: skip
    if theirs is not None:
        assert find_p_value(values) == pytest.approx(min(1.0, theirs.pvalue), abs=0.03)


def test_p_values_of_many_pairs_are_drawn_and_near_the_truth() -> None:
    rng = np.random.default_rng(0)
    level = [find_p_value(rng.normal(size=40), seed=seed) for seed in range(60)]
    assert 0.3 < np.mean(level) < 0.7
    assert find_p_value(rng.normal(1.0, size=40)) == pytest.approx(1e-4)
    assert np.isnan(find_p_value(np.empty(0)))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_the_correction_is_holms(values: list[float]) -> None:
    found = correct_family(values)
    ranked = sorted(values)
    count = len(values)
    for p, corrected in zip(values, found, strict=True):
        place = max(at for at, other in enumerate(ranked) if other <= p)
        steps = [min(1.0, (count - at) * ranked[at]) for at in range(place + 1)]
        assert corrected == pytest.approx(max(steps))
    assert np.isnan(correct_family([float("nan"), 0.5])[0])
    assert correct_family([float("nan"), 0.5])[1] == 0.5


# ---- differences ---------------------------------------------------------------------------------


def test_differences_are_those_of_the_same_examples(report: af.Report) -> None:
    (row,) = report.differences("deletion", methods=["rollout", "raw"])
    values = (report.values("rollout", "deletion") - report.values("raw", "deletion"))[1]
    assert row.difference == pytest.approx(values.mean())
    assert row.low <= row.difference <= row.high
    assert row.p == row.corrected == find_p_value(values)
    assert (row.layer, row.examples, row.undefined, row.replacement) == (6, 6, 0, "unknown")
    (low,) = report.differences("deletion", methods=["rollout", "raw"], layer=1)
    assert low.layer == 1
    (other,) = report.differences("deletion", methods=["rollout", "raw"], replacement="attention")
    assert other.replacement == "attention"
    assert other.difference != row.difference


def test_all_comparisons_are_one_family(report: af.Report) -> None:
    found = report.differences()
    assert len(found) == 3 * 3  # yardsticks, pairs
    assert [each.corrected for each in found] == correct_family([each.p for each in found])
    wider = report.differences("deletion", methods=[*report.methods, "random order"])
    assert len(wider) == 6
    assert [each.layer for each in wider if each.method == "flat"] == [None]
    assert "by Holm over 6 comparisons" in wider.to_markdown()
    assert wider.to_pandas().columns.tolist() == list(wider.columns)


def test_undefined_values_are_left_out_in_pairs_or_zero(report: af.Report) -> None:
    first, second = report.values("rollout", "blank_out")[1], report.values("flat", "blank_out")[0]
    missing = np.isnan(second)
    assert missing.sum() == 2
    (row,) = report.differences("blank_out", methods=["rollout", "flat"])
    assert (row.examples, row.undefined) == (4, 2)
    assert row.difference == pytest.approx((first - second)[~missing].mean())
    zero = replace(report, undefined="zero")
    (row,) = zero.differences("blank_out", methods=["rollout", "flat"])
    assert (row.examples, row.undefined) == (6, 2)
    assert row.difference == pytest.approx((first - np.nan_to_num(second)).mean())


def test_differences_are_saved(report: af.Report, tmp_path: Path) -> None:
    for ending in (".md", ".csv", ".tex", ".json"):
        found = report.differences("deletion").save(tmp_path / f"differences{ending}")
        assert "rollout" in found.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"against": "fidelity"}, "no yardstick 'fidelity'; it has blank_out, comprehensiveness"),
        ({"layer": 3}, "no layer 3; it has 1, 6"),
        ({"methods": ["raw", "flow"]}, "no method 'flow'; it has raw, rollout, flat"),
        ({"methods": ["raw"]}, "two different methods or more; got raw"),
        ({"methods": ["raw", "raw"]}, "two different methods or more; got raw, raw"),
        ({"replacement": "mask"}, "no replacement 'mask'; it has unknown, attention"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    report: af.Report, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(af.OptionError, match=message):
        report.differences(**options)


# ---- agreement -----------------------------------------------------------------------------------


def test_agreement_is_that_of_means_and_of_examples(report: af.Report) -> None:
    rows = {row[0]: row for row in report.agreement().rows()}
    assert list(rows) == ["comprehensiveness", "deletion"]
    metric, first, second, methods, examples, count = rows["deletion"]
    assert (first, second, count) == ("unknown", "attention", 5)
    by_way = [
        np.concatenate([report.values(method, metric, way) for method in report.methods])
        for way in WAYS
    ]
    expected = kendalltau(*(rows.mean(axis=1).round(9) for rows in by_way)).statistic
    assert methods == pytest.approx(expected)
    each = [spearmanr(*pair).statistic for pair in zip(*by_way, strict=True)]
    assert examples == pytest.approx(np.mean(each))
    assert "| deletion | unknown | attention |" in report.to_markdown()


def test_agreement_needs_two_replacements() -> None:
    found = af.evaluate(
        af.load("verb-number"), TEXTS[:2], layers=6, against=(), faithfulness="deletion"
    )
    with pytest.raises(af.OptionError, match=r"between two replacements or more.*got unknown"):
        found.agreement()
