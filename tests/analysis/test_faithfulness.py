"""Faithfulness against loops by hand, the best order against all orders, and what is refused."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow.analysis.faithfulness.faithfulness import Measurement, measure_orders
from attnflow.analysis.faithfulness.metrics import BINS, METRICS, PerturbationCurve, count_units
from attnflow.analysis.faithfulness.orders import (
    EXACT_UNITS,
    Search,
    find_by_beam,
    find_exact,
    list_sets,
    order_units,
)
from attnflow.analysis.faithfulness.perturb import Inquiry, Perturber, Question, read_replacement
from attnflow.core.groups import Group
from tests.families import build, word_tokenizer

TEXTS = {
    "bundled": "the old keys to the cabinets",
    "classifier": "the lost key is here",
    "masked LM": "the [MASK] to the cabinets is",
    "causal LM": "the key to the cabinets is",
}
FAMILIES = {"classifier": "distilbert", "masked LM": "modernbert", "causal LM": "llama"}
PLAIN = ["comprehensiveness", "sufficiency", "log_odds", "deletion", "insertion"]


def model_of(name: str) -> af.Model:
    if name == "bundled":
        return af.load("verb-number")
    return af.Model(build(FAMILIES[name]), word_tokenizer())


def run_plainly(model: af.Model, ids: list[int], mask: list[int], at: int) -> torch.Tensor:
    """[class]: log-probabilities by one plain forward pass on one sequence, without padding."""
    with torch.no_grad():
        logits = model.model(
            input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask])
        ).logits[0]
    return (logits if logits.ndim == 1 else logits[at]).double().log_softmax(-1)


def loop_by_hand(
    model: af.Model, text: str, scores: Any, replacement: Any, bins: Any
) -> dict[str, float]:
    """Every plain metric, by its formula, one forward pass at a time."""
    encoded = model.encode(text)
    ids, at = list(encoded.ids), model.logit_position(encoded)
    fixed = {place for place, mark in enumerate(encoded.special) if mark} | {model.focal(encoded)}
    free = [place for place in range(len(ids)) if place not in fixed]
    free.sort(key=lambda place: -scores[place])
    n = len(free)
    whole = run_plainly(model, ids, [1] * len(ids), at)
    target = int(whole.argmax())

    def log_without(gone: list[int]) -> float:
        left, mask, where = list(ids), [1] * len(ids), at
        if replacement == "removal":
            left = [number for place, number in enumerate(ids) if place not in gone]
            mask, where = [1] * len(left), at - sum(place < at for place in gone)
        for place in gone:
            if replacement == "attention":
                mask[place] = 0
            elif replacement != "removal":
                left[place] = replacement
        return float(run_plainly(model, left, mask, where)[target])

    logs = [log_without(free[:k]) for k in range(n + 1)]
    kept = np.exp([log_without(free[k:]) for k in range(n + 1)])
    deleted = np.exp(logs)
    sizes = [max(1, -(-n * q // 100)) for q in bins]
    return {
        "comprehensiveness": np.mean([deleted[0] - deleted[k] for k in sizes]),
        "sufficiency": np.mean([deleted[0] - kept[k] for k in sizes]),
        "log_odds": np.mean([logs[k] - logs[0] for k in sizes]),
        "deletion": np.trapezoid(deleted) / n,
        "insertion": np.trapezoid(kept) / n,
        "comprehensiveness@50": deleted[0] - deleted[-(-n // 2)],
    }


# ---- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("replacement", ["unknown", "removal", "attention", 5])
def test_metrics_equal_a_loop_by_hand(name: str, replacement: Any) -> None:
    model = model_of(name)
    scores = np.random.default_rng(0).random(len(model.encode(TEXTS[name]).ids))
    by_hand = model.tokenizer.unk_token_id if replacement == "unknown" else replacement
    for bins in (BINS, (5, 20, 50)):
        expected = loop_by_hand(model, TEXTS[name], scores, by_hand, bins)
        found = af.faithfulness(
            model, TEXTS[name], scores, metrics=list(expected), replacement=replacement, bins=bins
        )
        assert found == pytest.approx(expected, abs=2e-6)
    assert abs(found["comprehensiveness"]) > 1e-4


def test_a_list_gives_a_list_and_batches_change_nothing() -> None:
    model = model_of("bundled")
    texts = ["the key to the cabinets", "the old houses", "the men near the river in the town"]
    scores = [np.arange(len(model.encode(text).ids)) for text in texts]
    alone = [af.faithfulness(model, *pair) for pair in zip(texts, scores, strict=True)]
    for batch_tokens in (None, 1, 10_000):
        together = af.faithfulness(model, texts, scores, batch_tokens=batch_tokens)
        for found, expected in zip(together, alone, strict=True):
            assert found == pytest.approx(expected, abs=1e-6)


def test_values_of_the_target_are_what_they_are_called() -> None:
    model = model_of("bundled")
    text = TEXTS["bundled"]
    ids = list(model.encode(text).ids)
    gone = [*ids[:2], 1, *ids[3:]]  # without "old", which has the highest score
    scores = [0, 0, 9, 0, 0, 0, 0]

    def read(row: list[int]) -> dict[str, float]:
        with torch.no_grad():
            logits = model.model(torch.tensor([row])).logits[0].double()
        chances = logits.softmax(-1)
        values = {"logit": logits, "probability": chances, "log_probability": chances.log()}
        return {name: float(value[0]) for name, value in values.items()}

    before, after = read(ids), read(gone)
    for name in before:
        found = af.faithfulness(
            model, text, scores, target="singular", target_of=name, metrics="comprehensiveness@1"
        )["comprehensiveness@1"]
        assert found == pytest.approx(before[name] - after[name], abs=1e-5)
    odds = af.faithfulness(
        model, text, scores, target=0, target_of="log-probability", metrics=["log_odds@1"]
    )
    assert odds["log_odds@1"] == pytest.approx(
        after["log_probability"] - before["log_probability"], abs=1e-5
    )


def test_groups_are_taken_away_as_a_whole_and_may_come_with_the_scores() -> None:
    model = model_of("bundled")
    text = "the old keys to the cabinets"
    groups = [[1, 2, 3], [4, 5, 6]]
    found = af.faithfulness(
        model, text, [1.0, 0.0], groups=groups, metrics=["comprehensiveness@50"]
    )
    importance = af.blank_out(model, text, groups=groups, signed=True)
    assert found["comprehensiveness@50"] == pytest.approx(importance.values[0], abs=1e-6)
    first = np.argsort(-importance.values)[0]
    own = af.faithfulness(model, text, importance, metrics=["comprehensiveness@50"])
    assert own["comprehensiveness@50"] == pytest.approx(importance.values[first], abs=1e-6)
    words = af.rollout(af.capture(model, text), groups="words")
    assert af.faithfulness(model, text, words, groups="words") == pytest.approx(
        af.faithfulness(model, text, words.at(0)), abs=1e-9
    )


def test_token_attention_counts_by_the_row_of_the_explained_position() -> None:
    model = model_of("causal LM")
    text = TEXTS["causal LM"]
    graph = af.capture(model, text).graph()
    for position in (None, 3):
        at = model.focal(model.encode(text)) if position is None else position
        row = af.rollout(graph).at(at)
        found = af.faithfulness(model, text, af.rollout(graph), position=position)
        assert found == af.faithfulness(model, text, row, position=position)
        assert found == af.faithfulness(
            model, text, af.rollout(graph, positions=[at]), position=position
        )


def test_special_tokens_and_the_place_of_the_prediction_stay() -> None:
    seen = []

    def look(curve: PerturbationCurve) -> float:
        seen.append(curve.size)
        return 0.0

    counts = {"bundled": 6, "classifier": 5, "masked LM": 5}
    inputs: list[tuple[str, Any, int]] = [(name, TEXTS[name], n) for name, n in counts.items()]
    inputs.append(("causal LM", [5, 6, 7, 8], 3))  # no special token: the last one asks
    for name, text, units in inputs:
        model = model_of(name)
        seen.clear()
        af.faithfulness(model, text, np.zeros(len(model.encode(text).ids)), metrics=look)
        assert seen == [units], name


def test_ties_count_in_the_order_of_the_text_and_rounding_breaks_none() -> None:
    assert order_units(np.array([0.0, 1.0, 0.0, 1.0 + 1e-13])) == (1, 3, 0, 2)
    assert order_units(np.zeros(3)) == (0, 1, 2)
    assert order_units(np.array([-1.0, 0.5, -2.0])) == (1, 0, 2)


def test_a_user_defined_metric_is_a_function_of_the_whole_curve() -> None:
    def steepest(curve: PerturbationCurve) -> float:
        assert np.isfinite([curve.deleted, curve.kept, curve.log_deleted, curve.log_kept]).all()
        assert curve.deleted[0] == curve.kept[-1]
        assert curve.deleted[-1] == curve.kept[0]
        return float(-np.diff(curve.deleted).min())

    model, text = model_of("bundled"), TEXTS["bundled"]
    scores = af.blank_out(model, text)
    found = af.faithfulness(model, text, scores, metrics={"steepest": steepest, "deletion": None})
    assert list(found) == ["steepest", "deletion"]
    assert found["steepest"] > 0.01
    assert af.faithfulness(model, text, scores, metrics=steepest)["steepest"] == found["steepest"]


# ---- work ----------------------------------------------------------------------------------------


def test_identical_inputs_run_once_for_all_inputs_and_orders() -> None:
    model = model_of("bundled")
    encoded = model.encode("the key to the key")
    units = tuple(Group(str(place), (place,)) for place in range(1, 6))
    unknown, removal = (read_replacement(model, name) for name in ("unknown", "removal"))
    questions = [Question(encoded, 0, 0, units, unknown) for _ in range(2)]
    request = Measurement.read(["comprehensiveness", "deletion"], BINS, "probability")
    orders = [(0, 1, 2, 3, 4), (0, 1, 2, 4, 3), (1, 0, 2, 3, 4)]
    perturber = Perturber(model)
    perturber.answer([(each, measure_orders(each, orders, request)) for each in questions])
    sets = {taken for order in orders for taken in list_sets(order)}
    assert perturber.runs == len(sets) == 8
    shorter = Question(encoded, 0, 0, units, removal)
    perturber.run([(shorter, [0, 0b00011, 0b11011, 0b00011])])
    assert perturber.runs == 10  # "to the key" and "to"; the whole input is known
    perturber.run([(shorter, [0b00100, 0b11000, 0b10100])])
    twin = Question(model.encode("the key the key"), 0, 0, units[:4], removal)
    perturber.run([(twin, [0, 0b0011, 0b1100])])
    assert perturber.runs == 14  # "the key the key", "the key to", "the key the"; "the key"


def test_bins_alone_run_for_metrics_over_bins() -> None:
    model = model_of("bundled")
    text = "the old keys to the cabinets in the house near the river"
    encoded = model.encode(text)
    units = tuple(Group(str(place), (place,)) for place in range(1, len(encoded.ids)))
    question = Question(encoded, 0, 0, units, read_replacement(model, None))
    request = Measurement.read("comprehensiveness@20", BINS, "probability")
    perturber = Perturber(model)
    perturber.answer([(question, measure_orders(question, [tuple(range(len(units)))], request))])
    assert perturber.runs == 2


# ---- the best and the worst order ----------------------------------------------------------------


def drive(inquiry: Inquiry[Any], values: dict[int, float]) -> Any:
    """Answer an inquiry from a table of the values of all sets."""
    try:
        asked = next(inquiry)
        while True:
            asked = inquiry.send(np.array([[values[taken]] * 3 for taken in asked]))
    except StopIteration as end:
        return end.value


def add_up(search: Search, order: Any, values: dict[int, float]) -> float:
    sets = search.ask(list_sets(order))
    return float(search.weights @ [values[taken] for taken in sets])


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["comprehensiveness", "sufficiency", "deletion", "comprehensiveness@30"]),
    st.booleans(),
)
def test_the_exact_search_equals_all_orders(size: int, seed: int, name: str, largest: bool) -> None:
    rng = np.random.default_rng(seed)
    values = dict(enumerate(rng.random(1 << size).round(1)))  # ties among them
    metric = METRICS[name]
    search = Search(metric.weigh(size, BINS), 0, metric.kept, largest)
    totals = [add_up(search, order, values) for order in permutations(range(size))]
    best = max(totals) if largest else min(totals)
    assert add_up(search, drive(find_exact(search), values), values) == pytest.approx(best)
    followed = add_up(search, drive(find_by_beam(search), values), values)
    assert min(totals) - 1e-12 <= followed <= max(totals) + 1e-12
    if size <= 3:  # the beam holds all
        assert followed == pytest.approx(best)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=2, max_size=8), st.sampled_from(PLAIN))
def test_perfect_scores_of_an_additive_function_give_the_best_order(
    parts: list[int], name: str
) -> None:
    size = len(parts)
    total = sum(parts)
    values = {
        taken: total - sum(part for place, part in enumerate(parts) if taken >> place & 1) + 0.0
        for taken in range(1 << size)
    }
    metric = METRICS[name]
    search = Search(metric.weigh(size, BINS), 0, metric.kept, not metric.lower)
    perfect = add_up(search, order_units(np.array(parts, float)), values)
    for find in (find_exact, find_by_beam):
        assert add_up(search, drive(find(search), values), values) == pytest.approx(perfect)
    upside_down = add_up(search, order_units(-np.array(parts, float)), values)
    assert (upside_down >= perfect - 1e-9) if metric.lower else (upside_down <= perfect + 1e-9)


def test_normalised_metrics_stand_between_the_worst_order_and_the_best() -> None:
    model = model_of("bundled")
    text = "the old keys to cabinets"
    scores = np.zeros(6)
    by_order = {}
    for order in permutations(range(1, 6)):
        scores[list(order)] = range(5, 0, -1)
        by_order[order] = scores.copy()
    metrics = ["comprehensiveness", "sufficiency"]
    metrics += [f"normalised_{name}" for name in metrics]
    found = af.faithfulness(model, [text] * 120, list(by_order.values()), metrics=metrics)
    for name, best in {"comprehensiveness": max, "sufficiency": min}.items():
        values = np.array([each[name] for each in found])
        normalised = np.array([each[f"normalised_{name}"] for each in found])
        low, high = values.min(), values.max()
        expected = (values - low) / (high - low) if best is max else (high - values) / (high - low)
        np.testing.assert_allclose(normalised, expected, atol=1e-6)


def test_a_long_text_is_searched_by_a_beam_and_stays_between_its_limits() -> None:
    model = model_of("bundled")
    text = "the old keys to the cabinets in the house near the large river"
    count = len(model.encode(text).ids)
    assert count - 1 > EXACT_UNITS
    good, poor = af.blank_out(model, text, signed=True).values, np.arange(count)
    found = af.faithfulness(model, [text] * 2, [good, poor], metrics="normalised_comprehensiveness")
    values = [each["normalised_comprehensiveness"] for each in found]
    assert 0 <= values[1] < values[0] <= 1


@pytest.mark.parametrize("name", ["copy", "relay", "conjunction", "majority"])
def test_the_truth_of_a_planted_model_is_the_best_order(name: str) -> None:
    planted = af.planted(name)
    texts = [text for text in planted.examples(20, seed=1) if len(text.split()) <= 7][:2]
    scores = []
    for text in texts:
        scores.append(np.zeros(len(planted.model.encode(text).ids)))
        scores[-1][list(planted.truth(text))] = 1.0
    metrics = ["normalised_comprehensiveness", "normalised_sufficiency"]
    good, bad = (
        af.faithfulness(planted.model, texts, [sign * row for row in scores], metrics=metrics)
        for sign in (1, -1)
    )
    for metric in metrics:
        best, worst = (np.mean([each[metric] for each in found]) for found in (good, bad))
        if name in ("copy", "relay"):  # one word says it all
            assert (best, worst) == pytest.approx((1.0, 0.0), abs=1e-4)
        else:  # of several words, some orders are better than others
            assert best > 0.75
            assert worst < 0.25


def test_a_normalised_metric_of_equal_orders_is_undefined() -> None:
    even = np.full(3, 0.5)
    limits = {"normalised_sufficiency": (0.0, 0.0)}
    curve = PerturbationCurve(even, even, even, even, limits=limits)
    assert np.isnan(METRICS["normalised_sufficiency"](curve))
    assert [count_units(10, percent) for percent in (10, 20, 100)] == [1, 2, 10]


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scores": [1.0, 2.0]}, r"scores must be one number per token, 6 here; got shape \(2,\)"),
        ({"scores": [[0.0] * 6]}, r"one number per token, 6 here; got shape \(1, 6\)"),
        ({"scores": [0, 1, np.nan, 3, 4, 5]}, "scores must be finite; got nan"),
        ({"scores": "the key"}, "scores must be an array of real numbers"),
        ({"metrics": "comprehensivness"}, "unknown metric 'comprehensivness'; choose from"),
        ({"metrics": ["deletion@20"]}, "unknown metric 'deletion@20'"),
        ({"metrics": ["comprehensiveness@0"]}, "unknown metric 'comprehensiveness@0'"),
        ({"metrics": []}, "at least one metric is needed"),
        ({"metrics": ["deletion", "deletion"]}, "got 'deletion' twice"),
        (
            {"metrics": {"deletion": len}},
            "must be a function with a name of its own; got 'deletion'",
        ),
        ({"metrics": {"mine": 3}}, "must be a function"),
        ({"metrics": {"mine": lambda curve: "x"}}, "the metric 'mine' must give a number"),
        ({"metrics": {"mine": lambda curve: curve.nothing}}, "mine failed: AttributeError"),
        ({"metrics": 3}, "metrics must be names"),
        ({"replacement": "mask"}, "replacement='mask' needs a token of its own"),
        ({"replacement": "[MASK]"}, r"a token that the tokenizer of VerbNumber has.*'\[MASK\]'"),
        ({"replacement": 10**9}, "or its id; got 1000000000"),
        ({"replacement": 1.5}, "replacement must be one of unknown, mask, removal, attention"),
        ({"bins": [0, 10]}, "bins must be percentages above 0 and up to 100; got 0"),
        ({"bins": []}, "at least one percentage"),
        ({"bins": [10, 10]}, "each once"),
        ({"bins": "10"}, "bins must be percentages"),
        ({"target_of": "odds"}, "unknown target_of='odds'; choose from probability"),
        ({"target": "dual"}, "unknown target 'dual'"),
        ({"groups": [[1, 2], [3]]}, "one number per group, 2 here"),
        ({"inputs": "key", "scores": [0.0, 1.0]}, "at least two tokens or groups.*got 1 of"),
        ({"inputs": ["a key", "the key"]}, "a list with one array per input, 2 here; got 6"),
        ({"target": ""}, "unknown target ''; choose from singular, plural"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    options: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"inputs": "the key to the cabinets", "scores": [0.0] * 6} | options
    with pytest.raises(af.OptionError, match=message) as error:
        af.faithfulness(model_of("bundled"), given.pop("inputs"), given.pop("scores"), **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("score", [af.blank_out, lambda *given: af.rollout(af.capture(*given))])
def test_results_of_another_text_of_the_same_length_are_refused(score: Any) -> None:
    model, text, other = model_of("bundled"), "the key to the cabinets", "the men near the house"
    result = score(model, other)
    message = "of the same tokens as the input; got a result of .*men near.*'men' and not 'key'"
    with pytest.raises(af.OptionError, match=f"scores must be {message}") as error:
        af.faithfulness(model, text, result)
    assert "\n" not in str(error.value)
    with pytest.raises(af.OptionError, match=f"scores of input 1 must be {message}"):
        af.faithfulness(model, [other, text], [result, result])
    with pytest.raises(af.OptionError, match=f"what own gives for 0 must be {message}"):
        af.evaluate(model, [text], methods=[], scorers={"own": [result]})


def test_weights_whose_tokens_nobody_named_may_be_of_any_text() -> None:
    model, text = model_of("bundled"), "the key to the cabinets"
    named = af.capture(model, text)
    unnamed = af.Attention(named.weights)
    found = [af.faithfulness(model, text, af.rollout(each)) for each in (named, unnamed)]
    assert found[0] == found[1]


def test_an_unknown_token_that_ends_texts_is_no_replacement() -> None:
    tokenizer = word_tokenizer()
    tokenizer.unk_token = tokenizer.sep_token
    model = af.Model(build("llama"), tokenizer)
    with pytest.raises(af.OptionError, match="uses the same token to end texts"):
        af.faithfulness(model, [5, 6, 7, 8], [0.0] * 4, replacement="unknown")
    with pytest.raises(af.OptionError, match="no head that predicts"):
        af.faithfulness(af.Model(build("bert")), [5, 6, 7], [0.0] * 3)
