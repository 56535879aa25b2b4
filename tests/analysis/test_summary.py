"""What results say in a sentence: every number in it is that of the arrays, sinks are not named, and nothing is claimed that is not there."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import attnflow as af
from attnflow.analysis.explain.summary import format_percent, name_word
from tests.explained import with_results
from tests.families import build, word_tokenizer

AUTHOR = "the author that the editors of the magazines like"


@pytest.fixture(scope="module")
def explained() -> af.Explanation:
    return af.explain(AUTHOR)


def test_every_number_of_a_summary_is_that_of_the_arrays(explained: af.Explanation) -> None:
    told = explained.summary()
    label, probability = explained.prediction or ("", 0.0)
    assert told.startswith(f"{label} {probability:.2f}. It read mostly ")
    assert "special tokens aside" in told
    row = explained.row("relevance flow", by_word=True)
    values = row.at(0)
    kept = [key for key, token in enumerate(row.tokens) if token != "[CLS]"]
    total = values[kept].sum()
    named = re.findall(r"(\w+) \((?:position \d+, )?(\d+) %\)", told)
    assert 1 <= len(named) <= 3
    best = sorted(kept, key=lambda key: -values[key])
    for (word, share), key in zip(named, best, strict=False):
        assert row.tokens[key] == word
        assert int(share) == round(100 * values[key] / total)
    (top, cost), *_ = re.findall(r"blanking (\w+) costs (\d\.\d\d)", told)
    blank = explained.word_importance["blank_out"]
    assert top == named[0][0]
    assert float(cost) == pytest.approx(blank.values[list(blank.tokens).index(top)], abs=0.005)
    most = blank.tokens[int(blank.values.argmax())]
    costliest = re.findall(r", (\w+) costs most, (\d\.\d\d)", told)
    assert [word for word, _ in costliest] == [most] * (most != top)
    for _, value in costliest:
        assert float(value) == pytest.approx(blank.values.max(), abs=0.005)
    (agreement,) = re.findall(r"relevance flow ranks tokens like blank-out at (-?\d\.\d\d)", told)
    assert float(agreement) == pytest.approx(explained.agreement["relevance flow"], abs=0.005)


def test_agreement_is_spearmans_without_the_explained_position(explained: af.Explanation) -> None:
    blank = np.abs(explained.importance["blank_out"].values[1:])
    assert set(explained.agreement) == {"relevance flow", "raw", "rollout", "flow"}
    for name, value in explained.agreement.items():
        row = explained.results[name].at(0)[1:].round(12)
        assert value == pytest.approx(spearmanr(row, blank).statistic, abs=1e-6)
    bare = replace(explained, importance={}, word_importance={})
    assert bare.agreement == {}
    assert "blank" not in bare.summary()
    flat = replace(
        explained.importance["blank_out"], values=np.zeros(len(explained.tokens))
    )  # undefined
    assert replace(explained, importance={"blank_out": flat}).agreement == {}


def sink_attention(size: int = 12, depth: int = 4) -> af.Attention:
    """The first position holds 0.9 of every row, "key" 0.02 more than the other ones."""
    weights = np.full((depth, size, size), 0.08 / (size - 1))
    weights[..., 0] = 0.9
    weights[..., 4] += 0.02
    weights /= weights.sum(axis=-1, keepdims=True)
    tokens = ["[CLS]", *(f"word{at}" for at in range(1, size))]
    tokens[4] = "key"
    return af.Attention(weights, tokens=tokens)


def test_sinks_are_left_out_of_the_sentence_but_not_of_the_result() -> None:
    found = af.explain(sink_attention(), methods=["raw", "rollout"], position=7)
    assert [(sink.position, sink.token) for sink in found.sinks] == [(0, "[CLS]")]
    assert found.first == "rollout"
    assert found.rollout.at(7).argmax() == 0
    told = found.summary()
    assert told.startswith("Position 7 read mostly key (")
    assert "[CLS]" not in told
    assert af.explain(sink_attention().graph(without=[0])).sinks == ()


def test_a_method_that_says_nothing_is_named_and_another_one_is_read() -> None:
    size = 12
    weights = np.full((3, size, size), 1 / size)
    even = af.explain(af.Attention(weights, tokens=[f"w{at}" for at in range(size)]))
    assert set(even.even) == {"raw", "rollout", "flow"}
    assert even.summary() == "Raw, rollout and flow say nothing here."
    weights[0, :, 5] += 0.4  # rollout shows the lowest layer, raw the top one
    found = af.explain(af.Attention(weights / weights.sum(-1, keepdims=True)), position=0)
    assert set(found.even) == {"raw", "flow"}
    assert found.even["raw"] < 0.02
    assert found.summary().startswith("Position 0 read mostly position 5 (")
    assert found.summary().endswith("Raw and flow say nothing here.")
    own = {"raw": found.raw, "mine": found.rollout}
    assert found.graph is not None
    only = with_results(found, own)
    assert only.first == "raw"
    assert only.summary().startswith("By mine position 0 read mostly position 5 (")
    assert only.summary().endswith("Raw says nothing here.")


def test_what_is_left_beside_sinks_is_told_where_it_is_little() -> None:
    found = af.explain(sink_attention(), methods=["rollout"], position=7)
    assert found.rollout.at(7)[0] < 0.9  # by the residual, half of it, in four layers
    assert "lies there" not in found.summary()
    stronger = af.Attention(0.1 * sink_attention().weights + 0.9 * np.eye(12)[0])
    told = af.explain(stronger, methods=["raw"], position=7).summary()
    assert told.endswith("Only 1 % of raw lies there.")


@pytest.mark.parametrize(
    ("family", "value"),
    [
        ("distilbert", "the lost key to the cabinets is here"),
        ("bert", "the lost key to the cabinets is here"),  # predicts nothing
        ("modernbert", "the [MASK] key is here"),
        ("llama", "the lost key to the cabinets is here"),
        ("vit", torch.rand(3, 24, 24, generator=torch.Generator().manual_seed(0))),
        ("t5", "the lost key to the cabinets is here"),
        ("gpt2", [5]),
    ],
)
def test_every_kind_of_model_has_a_sentence(family: str, value: Any) -> None:
    tokenizer = word_tokenizer() if isinstance(value, str) else None
    found = af.explain(value, model=af.Model(build(family), tokenizer))
    told = found.summary()
    assert told.endswith(".")
    assert "\n" not in told
    assert "nan" not in told
    assert "[CLS]" not in told
    assert "[SEP]" not in told
    assert told.startswith("Position 0") == (family == "bert")
    if family == "vit":
        assert re.search(r"read mostly the patch in row \d, column \d \(\d+ %\)", told)
    if family == "gpt2":
        assert "read" not in told  # nothing but itself
    assert set(found.agreement) <= set(found.results)
    assert all(value == value for value in found.agreement.values())
    assert len(repr(found)) < 120


def test_a_generation_says_what_it_read_and_what_stands_out() -> None:
    model = af.Model(build("gpt2"))
    story = af.generate(model, [7, 23, 41, 9, 55, 12], max_new_tokens=6, eos_token_id=None)
    told = story.summary()
    assert told.startswith(
        f"6 tokens with a mean probability of {np.mean(story.probabilities):.2f}."
    )
    shares = story.by("rollout", edges="contribution", normalize="sum").values[:, :, -1]
    assert np.array_equal(shares, story.first_result.values[:, :, -1])
    gone = [sink.position for sink in story.sinks if sink.position < 6]
    shares[:, gone] = 0
    shares /= shares.sum(axis=1, keepdims=True)
    mean = shares.mean(axis=0)
    top = int(mean.argmax())
    assert f"They read mostly {story.prompt[top]} ({100 * mean[top]:.0f} %)" in told
    others = (shares.sum(axis=0) - shares) / 5
    token, word = np.unravel_index((shares - others).argmax(), shares.shape)
    here, elsewhere = (format_percent(float(each[token, word])) for each in (shares, others))
    expected = f"{story.tokens[token]} stands out: {story.prompt[word]} has {here}, {elsewhere}"
    assert expected in told
    one = af.generate(model, [7, 23, 41], max_new_tokens=1, eos_token_id=None)
    assert re.fullmatch(
        r"\d+ 0\.\d\d\. It read (only|mostly) .* of the prompt(, sinks aside)?\.", one.summary()
    )


def test_a_sentence_says_what_its_shares_leave_aside() -> None:
    told = af.explain("the keys to the old house").summary()
    assert re.search(r"It read mostly .* \(\d+ %\), special tokens aside; blanking", told)
    told = af.explain(sink_attention(), methods=["rollout"], position=7).summary()
    assert re.search(r"read mostly key \(\d+ %\), sinks and itself aside\.", told)
    told = af.explain(sink_attention(), methods=["rollout"], position=0).summary()
    assert re.search(r"read mostly key \(\d+ %\), sinks aside\.", told)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_an_even_row_reads_nothing_mostly_however_short_it_is(size: int) -> None:
    tokens = [f"w{at}" for at in range(size)]
    even = af.Attention(np.full((2, size, size), 1 / size), tokens=tokens)
    read = "only w1" if size == 2 else f"all {size - 1} tokens alike"
    for name in ("raw", "rollout"):
        told = af.explain(even, methods=[name], position=0).summary()
        assert told == f"Position 0 read {read}, itself aside."
    uneven = np.full((2, size, size), 1 / size)
    uneven[:, :, -1] += 0.1
    uneven /= uneven.sum(axis=-1, keepdims=True)
    told = af.explain(af.Attention(uneven, tokens=tokens), methods=["raw"], position=0).summary()
    assert ("mostly" in told) == (size > 2)
    assert (
        af.explain("key", importance=())
        .summary()
        .endswith("It read only key, special tokens aside.")
    )


def test_an_unknown_word_is_told_without_its_class() -> None:
    found = af.explain("the 🔑🔑 zorbs")
    assert found.tokens == ("[CLS]", "the", "🔑/NN", "🔑/NN", "zorbs/NNS")  # in the tables
    told = found.summary()
    assert "“🔑🔑” (" in told
    assert "zorbs (" in told
    assert "NN" not in told
    assert found.rollout.by_word().tokens == ("[CLS]", "the", "🔑🔑", "zorbs")


def test_words_of_a_sentence_are_plain() -> None:
    assert [name_word(word) for word in ("Ġlast.", "(authors,", ",", "x" * 99, "##s")] == [
        "last",
        "authors",
        "“,”",
        f"“{'x' * 39}…”",
        "s",
    ]
    assert name_word("\x1b[31m") == "“\\x1b[31m”"
    assert [format_percent(value) for value in (0.284, 1.0, 0.0, 0.004, 0.00012)] == [
        *("28 %", "100 %", "0 %", "0.4 %", "0.01 %")
    ]
