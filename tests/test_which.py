"""docs/which-method.md says what its benchmark measured, and the benchmark chooses as it says."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnflow as af
from attnflow.analysis.job import FIRST

ROOT = Path(__file__).parents[1]
BEFORE = dict(os.environ)
sys.path.insert(0, str(ROOT / "benchmarks"))
import which  # noqa: E402
import which_scores  # noqa: E402
import which_tables  # noqa: E402
from sheets import Sheet, copy_tables, tell_table  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))
os.environ.clear()  # benchmarks set what transformers reads
os.environ.update(BEFORE)

PAGE = ROOT / "docs" / "which-method.md"
RESULTS = ROOT / "benchmarks" / "results" / "which.json"
SMALL = which_scores.Setting(
    4, 48, ("unknown",), metrics=which_scores.BINNED, edges=("attention", "norm"), together=2
)
TEXTS = ["the key to the old cabinets", "the old keys", "the men near the house", "the key is lost"]


# ---- the page ------------------------------------------------------------------------------------


def test_the_page_shows_the_tables_that_were_measured() -> None:
    tables = json.loads(RESULTS.read_text(encoding="utf-8"))["tables"]
    text = PAGE.read_text(encoding="utf-8")
    shown = re.findall(r"<!-- (?!end)([^:]+?) -->\n\n(.*?)\n<!-- end -->", text, flags=re.DOTALL)
    assert {name for name, _ in shown} >= {"choices", "planted", "truth", "replacements"}
    for name, body in shown:
        assert body == tell_table(tables[name])
    measured = RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    for table in tables.values():
        assert Sheet(**table).markdown().rstrip() in measured


def test_every_interval_that_the_page_quotes_was_measured() -> None:
    measured = RESULTS.with_suffix(".md").read_text(encoding="utf-8")
    quoted = re.findall(r"[+-]\d\.\d\d \[[^\]]+\]", PAGE.read_text(encoding="utf-8"))
    assert len(quoted) > 100
    assert [each for each in quoted if each not in measured] == []


@pytest.mark.parametrize("page", ["truth.md", "which-method.md"])
def test_a_page_shows_the_tables_of_other_benchmarks(page: str, tmp_path: Path) -> None:
    written = (PAGE.parent / page).read_text(encoding="utf-8")
    copy = tmp_path / page
    copy.write_text(written, encoding="utf-8")
    copy_tables(copy)
    assert copy.read_text(encoding="utf-8") == written
    assert written.count("<!-- truth: ") >= 1


@pytest.mark.parametrize(("kind", "benchmark"), [("decoder", "truth"), ("encoder", "classifiers")])
def test_the_default_is_what_the_benchmark_chose(kind: str, benchmark: str) -> None:
    measured = json.loads(RESULTS.with_name(f"{benchmark}.json").read_text(encoding="utf-8"))
    assert " ".join(FIRST[kind]) == measured["chosen"]


# ---- the choice ----------------------------------------------------------------------------------


def make_measured(
    scores: dict[str, list[float]], name: str = "verb-number"
) -> which_tables.Measured:
    """A model where rows have these values by all yardsticks; others are random."""
    count = len(next(iter(scores.values())))
    setting = replace(SMALL, edges=("attention", "gradient"))
    records = []
    for place in range(count):
        rows = dict.fromkeys(which_scores.list_rows(setting), 0.0) | {which_scores.BEST: 2.0}
        rows |= {row: values[place] for row, values in scores.items()}
        by_name = {yardstick: dict(rows) for yardstick in which_tables.JUDGES}
        records.append({"tokens": 5, "yardsticks": {"unknown": by_name}})
    return which_tables.Measured(name, setting, records)


def test_shares_run_from_the_random_order_to_the_best_found() -> None:
    measured = make_measured({"attention rollout": [0.5, 1.5], "random order": [0.5, 0.5]})
    shares = measured.shares("sufficiency")
    assert np.mean(shares["random order"]) == 0.0
    assert np.mean(shares["best found"]) == pytest.approx(1.0)
    assert shares["attention rollout"] == pytest.approx([0.0, 1.0 / 1.5])
    assert measured.scores()["attention rollout"] == pytest.approx(shares["attention rollout"])


def test_even_texts_choose_and_odd_texts_decide() -> None:
    kind = "encoder classifier"
    today = which.TODAY[kind]
    high, low = [1.0] * 20, [0.2] * 20
    split = [high[0], -1.0] * 10  # best where it is chosen, worst where it is judged
    clear = make_measured({"attention raw": high, today: low})
    assert which.choose(kind, {"verb-number": clear}).default == "attention raw"
    lucky = make_measured({"attention raw": split, today: low})
    found = which.choose(kind, {"verb-number": lucky})
    assert (found.chosen, found.default, found.behind) == ("attention raw", today, ("verb-number",))
    # one model against it is enough
    worse = make_measured({"attention raw": low, today: [0.3] * 20}, "sentiment")
    found = which.choose(kind, {"verb-number": clear, "sentiment": worse})
    assert (found.chosen, found.default, found.behind) == ("attention raw", today, ("sentiment",))


# ---- measuring -----------------------------------------------------------------------------------


def test_records_hold_what_evaluate_measures() -> None:
    model = af.load("verb-number")
    records = which_scores.measure_texts(model, TEXTS, SMALL)
    report = af.evaluate(
        model,
        TEXTS,
        layers=[6],
        edges=list(SMALL.edges),
        faithfulness=list(SMALL.metrics),
        replacement="unknown",
        against="blank_out",
    )
    for row, method in (("attention rollout", "rollout"), ("norm flow", "norm flow")):
        for metric in SMALL.metrics:
            found = [each["yardsticks"]["unknown"][metric][row] for each in records]
            np.testing.assert_allclose(found, report.values(method, metric)[0], atol=1e-6)
        found = [each["yardsticks"]["unknown"]["Spearman"][row] for each in records]
        np.testing.assert_allclose(found, report.values(method, "blank_out")[0], atol=1e-6)
    for metric in SMALL.metrics:
        values = [each["yardsticks"]["unknown"][metric] for each in records]
        random = [each["random order"] for each in values]
        np.testing.assert_allclose(random, report.values("random order", metric)[0], atol=1e-6)
        lower = metric != "comprehensiveness"
        for each in values:
            pick: Any = min if lower else max
            assert each["best found"] == pytest.approx(pick(each.values()))


def test_a_run_that_was_stopped_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = af.load("verb-number")
    whole = which_scores.measure_kept("whole", model, TEXTS, SMALL, tmp_path)
    first = which_scores.measure_kept("parts", model, TEXTS[:2], SMALL, tmp_path)
    asked: list[Any] = []
    measure = which_scores.measure_texts

    def count(*given: Any) -> Any:
        asked.extend(given[1])
        return measure(*given)

    monkeypatch.setattr(which_scores, "measure_texts", count)
    again = which_scores.measure_kept("parts", model, TEXTS, SMALL, tmp_path)
    assert asked == TEXTS[2:]
    assert again[:2] == first
    assert json.dumps(again) == json.dumps(whole)
    assert which_scores.measure_kept("parts", model, TEXTS, SMALL, tmp_path) == again
    assert asked == TEXTS[2:]


def test_some_models_measured_anew_leave_what_was_written_of_the_others() -> None:
    known = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert which.merge(known, {"tables": {}, "choices": [], "panels": []}) == {
        part: known[part] for part in ("choices", "tables", "panels")
    }
    header = ["yardstick", "smollm2 (attention)"]
    rows = [["sufficiency", "+9.99"], ["new", "+0.50"]]
    line = ["decoder", "a", "b", "smollm2", *"cdef"]
    panel = {"model": "smollm2", "yardstick": "Spearman", "rows": {}}
    fresh = {
        "tables": {
            "yardsticks": {"title": "", "header": header, "rows": rows},
            "choices": {"title": "", "header": [""] * 8, "rows": [line]},
        },
        "choices": [{"kind": "decoder", "chosen": "a"}],
        "panels": [panel],
    }
    merged = which.merge(known, fresh)
    table = {row[0]: row[1:] for row in merged["tables"]["yardsticks"]["rows"]}
    old = {row[0]: row[1:] for row in known["tables"]["yardsticks"]["rows"]}
    assert table == old | {
        "sufficiency": [*old["sufficiency"][:-1], "+9.99"],
        "new": ["", "", "+0.50"],
    }
    assert [row for row in merged["tables"]["choices"]["rows"] if row[3] == "smollm2"] == [line]
    assert merged["tables"]["choices"]["rows"][:-1] == known["tables"]["choices"]["rows"][:-1]
    assert [each["kind"] for each in merged["choices"]] == ["encoder classifier", "decoder"]
    assert merged["panels"][1:] == known["panels"][1:]
    assert merged["panels"][0] == panel
