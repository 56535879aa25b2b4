"""Rank correlations against scipy, the report's counts and forms, user-defined scorers, and refused options."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

import attnflow as af
from attnflow.analysis.evaluate.examples import read_examples
from attnflow.analysis.importance.importances import PAPER_IMPORTANCES
from attnflow.analysis.statistics import spearman
from tests.families import build, word_tokenizer

EXAMPLES = [
    ("the key to the cabinets", "singular"),
    ("the keys to the cabinet", "plural"),
    ("the old house", "singular"),
]


def model() -> af.Model:
    return af.load("verb-number")


# ---- the statistic --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=12))
def test_spearman_equals_scipy_with_ties_and_constants(pairs: list[tuple[int, int]]) -> None:
    scores, importance = np.array(pairs, float).T
    found = spearman(scores[None], importance)[0]
    if len(set(scores)) == 1 or len(set(importance)) == 1:
        assert np.isnan(found)
    else:
        assert found == pytest.approx(spearmanr(scores, importance).statistic, abs=1e-12)


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1))
def test_rounding_does_not_break_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.1, 0.2, 0.3], 12)
    importance = rng.random(12)
    noisy = scores * (1 + 1e-13 * rng.standard_normal(12))
    np.testing.assert_array_equal(
        spearman(noisy[None], importance), spearman(scores[None], importance)
    )


def test_spearman_of_one_token_is_undefined() -> None:
    assert np.isnan(spearman(np.array([[1.0]]), np.array([1.0]))).all()


# ---- the report -----------------------------------------------------------------------------------------------------------------


def test_correlations_are_those_of_the_methods_and_importances_themselves() -> None:
    report = af.evaluate(model(), EXAMPLES, layers=[2, 6])
    assert [len(list(report.rows())), report.layers, len(report.examples)] == [16, (2, 6), 3]
    for number, (text, label) in enumerate(EXAMPLES):
        graph = af.capture(model(), text).graph()
        for name, importance in PAPER_IMPORTANCES.items():
            expected_importance = importance(model(), [text], label)[0].values
            for method, compute in af.METHODS.items():
                row = compute(graph, layers=[2, 6]).at(position=0, layer=6)
                for special, kept in {True: slice(None), False: slice(1, None)}.items():
                    expected = spearmanr(
                        np.round(row[kept], 10), expected_importance[kept]
                    ).statistic
                    found = report.including(special).correlations[name, method][1, number]
                    assert found == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_the_target_is_the_label_where_one_is_given_else_the_prediction() -> None:
    predicted = model().predict(["the key to the cabinets"])[0][0]
    other = {"singular": "plural", "plural": "singular"}[predicted]
    report = af.evaluate(
        model(),
        ["the key to the cabinets", ("the key to the cabinets", other)],
        methods=["raw"],
        against=["blank_out"],
    )
    assert [example.label for example in report.examples] == [predicted, other]


def test_means_leave_out_what_is_undefined_and_count_it() -> None:
    def flat(text: str) -> list[float]:
        count = len(model().encode(text).ids)
        return [1.0] * count if "old" in text else list(range(count))

    report = af.evaluate(model(), EXAMPLES, methods=[], scorers=flat, against=["blank_out"])
    ((against, method, layer, mean, deviation, examples, undefined),) = report.rows()
    values = report.correlations["blank_out", "flat"][0]
    assert (against, method, layer, examples, undefined) == ("blank_out", "flat", None, 3, 1)
    assert np.isnan(values[2])
    assert mean == pytest.approx(values[:2].mean())
    assert deviation == pytest.approx(values[:2].std())
    assert report.mean("flat", "blank_out") == pytest.approx(mean)
    assert "| method | score | undefined |" in report.to_markdown()


def test_scores_of_the_users_are_ranked_against_their_own_importance() -> None:
    labels = dict(EXAMPLES)

    def exact(text: str) -> Any:
        return af.blank_out(model(), text, labels[text])

    report = af.evaluate(
        model(),
        EXAMPLES,
        methods="rollout",
        scorers={"exact": exact},
        against={"same": partial(af.blank_out, replacement="[UNK]"), "blank_out": None},
        layers=6,
    )
    assert report.mean("exact", "blank_out") == pytest.approx(1.0)
    assert report.mean("rollout", "same", 6) == pytest.approx(
        report.mean("rollout", "blank_out", 6)
    )
    assert "exact" in report.to_markdown()


def test_query_takes_the_largest_or_mean_row_or_another_position() -> None:
    text = EXAMPLES[0][0]
    values = af.rollout(af.capture(model(), text)).values  # [layer, query, key]
    queries: dict[Any, Any] = {
        "max": values.max(axis=1),
        "mean": values.mean(axis=1),
        2: values[:, 2],
        "focal": values[:, 0],
    }
    for query, expected in queries.items():
        report = af.evaluate(
            model(), [text], methods=["rollout"], against=["blank_out"], position=query
        )
        np.testing.assert_allclose(report.examples[0].scores["rollout"], expected, atol=1e-12)
        assert f"position {query}" in report.to_markdown()


def test_the_forms_of_a_report(tmp_path: Path) -> None:
    report = af.evaluate(model(), EXAMPLES, methods=["raw", "flow"], limit=2, special_tokens=True)
    text = report.to_markdown()
    assert text.count("| method | layer 1 |") == 2
    assert "n = 2; [CLS] included; position focal" in text
    assert "[CLS] left out" in report.including(False).to_markdown()
    header = "against,method,layer,mean,std,examples,undefined,source"
    assert report.to_csv().splitlines()[0] == header
    assert len(report.to_csv().splitlines()) == 1 + 2 * 2 * 6
    content = json.loads(report.to_json())
    assert content["examples"][1]["tokens"] == list(report.examples[1].tokens)
    assert len(content["examples"][0]["scores"]["flow"]) == 6
    for ending in (".md", ".csv", ".tex", ".json"):
        assert report.save(tmp_path / f"x{ending}").stat().st_size > 100
    with pytest.raises(
        af.FileError, match=r"the ending must be one of \.csv, \.json, \.md, \.tex; got \.xls"
    ):
        report.save(tmp_path / "x.xls")
    assert set(report.seconds) == {"blank_out", "input_gradient", "capture", "raw", "flow"}


def test_hugging_face_models_are_evaluated_alike() -> None:
    classifier = af.Model(build("distilbert"), word_tokenizer())
    report = af.evaluate(
        classifier, ["the key to the cabinets", ("the lost key", "LABEL_1")], layers=[1, 3]
    )
    assert report.examples[0].special == (True, False, False, False, False, False, True)
    assert "[CLS], [SEP] left out" in report.to_markdown()
    generator = af.Model(build("llama"), word_tokenizer())
    assert (
        len(af.evaluate(generator, ["the key to the cabinets"], against="blank_out").examples) == 1
    )


def test_an_interruption_returns_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    module = sys.modules["attnflow.analysis.evaluate.evaluate"]
    monkeypatch.setattr(module, "EXAMPLES_PER_STEP", 1)
    score, calls = module.Evaluation.score, []

    def interrupted(self: Any, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(self, *given)

    monkeypatch.setattr(module.Evaluation, "score", interrupted)
    report = af.evaluate(model(), EXAMPLES, methods=["raw"], against=["blank_out"])
    assert (len(report.examples), report.asked) == (2, 3)
    assert "n = 2 of 3 asked for" in report.to_markdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"methods": ["rolout"]},
            "unknown method 'rolout'; choose from raw, rollout, flow, or give a function",
        ),
        (
            {"against": ["gradient"]},
            "unknown importance 'gradient'; choose from blank_out, input_gradient",
        ),
        ({"methods": []}, "at least one method is needed"),
        ({"methods": ["raw", "raw"]}, "names of methods must be unique; got 'raw' twice"),
        ({"methods": {"raw": af.rollout}}, "a function with a name of its own"),
        ({"scorers": {"one": lambda text: [1.0]}}, "must be one number per token, 6 here"),
        (
            {"scorers": {"one": lambda text: 1 / 0}},
            "one on 'the key to the cabinets' failed: ZeroDivisionError",
        ),
        ({"limit": 0}, "limit must be a whole number, at least 1; got 0"),
        (
            {"position": "last"},
            "unknown position 'last'; choose from focal, max, mean, or a number",
        ),
        ({"position": 99}, "position"),
        ({"layers": [7]}, "layer"),
        ({"examples": []}, "there must be at least one example"),
        ({"examples": "the key"}, "got one text: put it in a list"),
        (
            {"examples": ["the key", ("the keys", "dual")]},
            "example 2: unknown target 'dual'; choose from singular, plural",
        ),
        ({"examples": ["key " * 70]}, "example 1: this model takes at most 64 tokens"),
    ],
)
def test_bad_options_are_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(af.AttnFlowError) as error:
        af.evaluate(model(), options.pop("examples", EXAMPLES), **options)
    assert message in str(error.value)


# ---- files of examples ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("the key\nthe keys\n", ["the key", "the keys"]),
        ("the key\tsingular\r\n\r\nthe keys\t1\r\n", [("the key", "singular"), ("the keys", "1")]),
        ("label\tsentence\nplural\tthe keys\n", [("the keys", "plural")]),
        ("\ufefftext\nthe keys\n", ["the keys"]),
        ("id\ttext\tlabel\n7\tthe keys\tplural\n", [("the keys", "plural")]),
    ],
)
def test_examples_are_read_from_a_file(content: str, expected: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_bytes(content.encode())
    assert read_examples(path, model()) == expected


def test_examples_are_read_from_csv_as_it_quotes_them(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text('text,label\n"the key, of course",singular\nthe keys,plural\n')
    assert read_examples(path, model()) == [
        ("the key, of course", "singular"),
        ("the keys", "plural"),
    ]
    path.write_text('text,label\n"the key,singular\n')
    with pytest.raises(af.FileError, match=r"x\.csv, line 2: not a line of CSV"):
        read_examples(path, model())
    other = tmp_path / "x.jsonl"
    other.write_text('{"text": "the key"}\n')
    with pytest.raises(
        af.FileError, match=r"one per line, from \.tsv, \.csv or \.txt; for \.jsonl"
    ):
        read_examples(other, model())


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "holds no examples"),
    "header only": (b"text\tlabel\n", "holds no examples"),
    "columns": (
        b"a\tb\tc\n",
        "line 1: one or two columns are needed, or a header that names text and label; got 3",
    ),
    "ragged": (
        b"the key\tsingular\nthe keys\n",
        "line 2: 2 columns are needed, as in the first line; got 1",
    ),
    "label": (
        b"the key\tsingular\nthe keys\tdual\n",
        "line 2: unknown target 'dual'; choose from singular, plural",
    ),
    "number": (b"the key\t7\n", "line 1: target must be from 0 to 1 for VerbNumber; got 7"),
    "encoding": (b"the key\nthe caf\xe9\n", "line 2: not UTF-8"),
    "long": (
        b"the key\n" + b"key " * 70 + b"\n",
        "line 2: this model takes at most 64 tokens; got 71",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_by_name_and_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.tsv"
    path.write_bytes(BAD[name][0])
    with pytest.raises(af.AttnFlowError, match=r"bad\.tsv") as error:
        read_examples(path, model())
    assert BAD[name][1] in str(error.value)
    with pytest.raises(af.FileError, match=r"cannot read .*missing\.tsv"):
        read_examples(tmp_path / "missing.tsv", model())


def test_the_signature_takes_a_hugging_face_model_as_it_is() -> None:
    found: Callable[..., af.Report] = af.evaluate
    assert (
        found(build("gpt2"), [[5, 6, 7, 8]], methods=["rollout"], against=["blank_out"]).model
        == "GPT2LMHeadModel"
    )


@pytest.mark.parametrize("number", [int, np.int64, np.int32])
def test_two_token_ids_are_an_example_not_an_input_and_its_label(number: Any) -> None:
    writer, ids = af.Model(build("llama"), word_tokenizer()), [5, 6]
    options: dict[str, Any] = {"methods": "rollout", "against": "blank_out"}
    found = af.evaluate(writer, [[number(each) for each in ids]], **options).examples[0]
    expected = af.evaluate(writer, [tuple(ids)], **options).examples[0]
    np.testing.assert_array_equal(found.scores["rollout"], expected.scores["rollout"])
