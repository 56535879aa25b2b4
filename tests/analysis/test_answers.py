"""Answers and spans: several positions explained together, against brute force and autograd."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import normalizers

import attnflow as af
from attnflow.analysis.page.page import describe_explanation
from attnflow.models.answers import read_answer
from tests.analysis.test_foils import spelled_model
from tests.console import inside
from tests.families import build
from tests.oracles import Floats

PROMPT, ANSWER = [3, 5, 7, 2, 9], [4, 8, 6]
SPAN = (4, 5, 6)
SAME = 1e-6
EDGES = ["contribution", "norm", "gradient", "relevance", "attention"]


@pytest.fixture(scope="module")
def model() -> Any:
    return af.Model(build("llama"))


def autograd_edges(ids: list[int], positions: tuple[int, ...], targets: list[int]) -> Floats:
    """Weights [layer, head, query, key], and the gradients of the summed logits by them."""
    module = deepcopy(build("llama", "eager"))
    output = module(torch.tensor([ids]), output_attentions=True)
    total = output.logits[0, list(positions), targets].sum()
    gradients = torch.autograd.grad(total, output.attentions)
    pairs = zip(output.attentions, gradients, strict=True)
    return np.stack([[weight[0].detach(), slope[0]] for weight, slope in pairs], axis=1)


def explain_answer(model: Any, **options: Any) -> af.Explanation:
    chosen: dict[str, Any] = {"methods": ["rollout"], "edges": EDGES, "importance": ["relevance"]}
    return af.explain(PROMPT, model=model, answer=ANSWER, **(chosen | options))


# ---- one start vector ----------------------------------------------------------------------------


def test_an_answer_of_one_token_is_a_target(model: Any) -> None:
    target = af.explain(PROMPT, model=model, target=8, importance=["relevance"])
    answer = af.explain(PROMPT, model=model, answer=[8], importance=["relevance"])
    assert list(answer.results) == list(target.results)
    assert answer.span == (4,)
    assert answer.tokens == target.tokens
    for name in target.results:
        np.testing.assert_allclose(answer.row(name).values, target.row(name).values, atol=SAME)
    assert answer.prediction is not None
    assert target.prediction is not None
    assert answer.prediction.probability == pytest.approx(target.prediction.target.probability)
    np.testing.assert_allclose(
        answer.importance["relevance"].values, target.importance["relevance"].values, atol=SAME
    )


def test_rollout_of_an_answer_is_one_start_vector_and_the_mean_of_rows(model: Any) -> None:
    found = explain_answer(model)
    assert found.explained == SPAN
    assert found.tokens == model.names(PROMPT + ANSWER[:-1])
    for name, graph in found.graphs.items():
        carried = np.eye(graph.size)[list(SPAN)]
        for edges in graph.edges[::-1]:
            carried = carried @ edges
        carried /= carried.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found.results[name].at(6), carried.mean(axis=0), atol=SAME)
    for name in ("contribution rollout", "norm rollout", "rollout"):  # rows sum to 1
        carried = np.zeros(7)
        carried[list(SPAN)] = 1 / 3
        for edges in found.graphs[name].edges[::-1]:
            carried = carried @ edges
        np.testing.assert_allclose(found.results[name].at(6), carried, atol=SAME)


def test_flow_of_an_answer_comes_from_its_positions_together(model: Any) -> None:
    found = explain_answer(model, methods=["flow"], edges="contribution", normalize=None)
    result, graph = found.results["contribution flow"], found.graphs["contribution flow"]
    for target in (0, 3, 6):
        best = af.max_flow(graph, source=(graph.depth, SPAN), target=(0, target))
        assert result.at(6)[target] == pytest.approx(best.value, abs=1e-9)


def test_methods_of_any_kind_are_mean_rows(model: Any) -> None:
    def plain(
        graph: Any, *, layers: Any = None, positions: Any, bottom: int = 0, normalize: Any
    ) -> af.TokenAttention:
        return af.rollout(
            graph, layers=layers, positions=positions, bottom=bottom, normalize=normalize
        )

    made = af.token_attention("made", lambda graph: af.rollout(graph, normalize=None).values)
    found = explain_answer(
        model, methods={"plain": plain, "made": made, "rollout": None}, edges="attention"
    )
    for name in ("plain", "made"):
        np.testing.assert_allclose(found.results[name].values, found.rollout.values, atol=1e-12)
        assert found.results[name].sources == found.rollout.sources


def test_a_span_is_explained_by_the_predictions_at_its_positions(model: Any) -> None:
    ids = PROMPT + ANSWER
    encoded = model.encode(ids)
    with torch.no_grad():
        best = model.logits(model.batch([encoded]), [2, 4, 7]).argmax(dim=-1).tolist()
    found = af.explain(ids, model=model, span=[-1, 2, 4], edges="gradient", methods=["rollout"])
    assert found.span == (2, 4, 7)
    weights, slopes = autograd_edges(ids, (2, 4, 7), best)
    expected = np.eye(8) + np.maximum(weights * slopes, 0).mean(axis=1)
    np.testing.assert_allclose(found.graphs["gradient rollout"].edges, expected, atol=1e-5)
    alone = af.explain(ids, model=model, span=[4], edges="gradient", methods=["rollout"])
    one = af.explain(ids, model=model, position=4, edges="gradient", methods=["rollout"])
    np.testing.assert_allclose(
        alone.results["gradient rollout"].at(4), one.results["gradient rollout"].at(4), atol=SAME
    )


# ---- gradients of the summed logits --------------------------------------------------------------


def test_gradient_edges_of_an_answer_equal_autograd(model: Any) -> None:
    weights, slopes = autograd_edges(PROMPT + ANSWER[:-1], SPAN, ANSWER)
    expected = np.eye(7) + np.maximum(weights * slopes, 0).mean(axis=1)
    edges = explain_answer(model).graphs["gradient rollout"].edges
    assert np.abs(expected - np.eye(7)).max() > 1e-3
    np.testing.assert_allclose(edges, expected, atol=1e-5)


def test_a_foil_of_another_length_is_subtracted_on_the_prompt_only() -> None:
    model = af.Model(build("llama"), spelled_model().tokenizer)
    options: dict[str, Any] = {"answer": " Paris key", "foil": "Rome"}
    said, other = (read_answer(model, "the to", text) for text in options.values())
    size, wide = said.prompt, len(said.encoded.ids)
    weights, slopes = autograd_edges(list(said.encoded.ids), said.span, list(said.ids))
    _, against = autograd_edges(list(other.encoded.ids), other.span, list(other.ids))
    slopes[:, :, :size, :size] -= against[:, :, :size, :size]
    expected = np.eye(wide) + np.maximum(weights * slopes, 0).mean(axis=1)
    found = af.explain("the to", model=model, edges=EDGES, importance=["relevance"], **options)
    assert (len(said.ids), len(other.ids), size) == (4, 1, 2)
    np.testing.assert_allclose(found.graphs["gradient rollout"].edges, expected, atol=1e-5)
    assert found.prediction is not None
    assert found.prediction.foil is not None
    assert found.prediction.foil.label == "Rome"
    ids = list(model.encode("the to").ids)
    total = sum_logits(model, ids, said.ids) - sum_logits(model, ids, other.ids)
    assert found.prediction.difference == pytest.approx(total, abs=1e-4)
    relevance = found.importance["relevance"]
    assert relevance.target == " Paris key - Rome"
    assert relevance.score == pytest.approx(total, abs=1e-4)
    apart = [af.relevance(model, "the to", answer=each.text).values for each in (said, other)]
    np.testing.assert_allclose(
        relevance.values[:size], apart[0][:size] - apart[1][:size], atol=1e-5
    )
    np.testing.assert_allclose(relevance.values[size:], apart[0][size:], atol=1e-5)
    alone = af.relevance(model, "the to", **options)
    np.testing.assert_allclose(alone.values, relevance.values, atol=SAME)


def sum_logits(model: Any, prompt: list[int], ids: Sequence[int]) -> float:
    """The sum of the logits of an answer's tokens, each after those before it."""
    total = 0.0
    for number, token in enumerate(ids):
        encoded = model.encode([*prompt, *ids[:number]])
        with torch.no_grad():
            total += float(model.logits(model.batch([encoded]), [len(encoded.ids) - 1])[0, token])
    return total


def test_relevance_of_an_answer_is_the_sum_over_its_tokens(model: Any) -> None:
    expected, score = np.zeros(7), 0.0
    for number, token in enumerate(ANSWER):
        one = af.relevance(model, PROMPT + ANSWER[:number], token)
        expected[: len(one.values)] += one.values
        assert one.score is not None
        score += one.score
    found = af.relevance(model, PROMPT, answer=ANSWER)
    np.testing.assert_allclose(found.values, expected, atol=1e-5)
    assert found.score == pytest.approx(score, abs=1e-4)
    assert found.values.sum() + (found.biases or 0.0) == pytest.approx(score, abs=1e-3)
    again = explain_answer(model).importance["relevance"]
    np.testing.assert_allclose(again.values, found.values, atol=SAME)
    listed = af.relevance(model, [PROMPT, PROMPT[1:]], answer=ANSWER)
    assert [len(each.values) for each in listed] == [7, 6]
    np.testing.assert_allclose(listed[0].values, found.values, atol=SAME)


def test_signed_relevance_of_an_answer_adds_up_to_the_relevance_of_the_input(model: Any) -> None:
    """Paths from each position, times its score: Llama has no biases."""
    graph = explain_answer(model, edges="signed_relevance").graphs["signed_relevance rollout"]
    rows = af.rollout(graph, layers=[graph.depth], positions=SPAN, normalize=None).values[0]
    encoded = model.encode(PROMPT + ANSWER[:-1])
    with torch.no_grad():
        scores = model.logits(model.batch([encoded]), SPAN)[[0, 1, 2], ANSWER].double().numpy()
    found = af.relevance(model, PROMPT, answer=ANSWER)
    np.testing.assert_allclose(scores @ rows, found.values, atol=1e-4)


def test_the_probability_of_an_answer_is_that_of_its_tokens_one_after_another(model: Any) -> None:
    expected = 1.0
    for number, token in enumerate(ANSWER):
        encoded = model.encode(PROMPT + ANSWER[:number])
        with torch.no_grad():
            logits = model.logits(model.batch([encoded]), [len(encoded.ids) - 1])
        expected *= float(model.probabilities(logits)[0, token])
    prediction = explain_answer(model).prediction
    assert prediction is not None
    assert prediction.probability == pytest.approx(expected, rel=1e-5)
    assert explain_answer(model).importance["relevance"].probability == pytest.approx(expected)


# ---- the tokens of an answer ---------------------------------------------------------------------


def test_an_answer_continues_its_text() -> None:
    model = spelled_model()
    for prompt, answer, ids in [
        ("the key to", " Paris Rome", [" ", "Paris", " ", "Rome"]),
        ("the key to", "Rome", ["Rome"]),
        ("t", "he key", ["h", "e", " ", "key"]),  # together "the"
    ]:
        read = read_answer(model, prompt, answer)
        assert [model.tokenizer.decode([number]) for number in read.ids] == ids
        assert read.encoded.ids == (*model.encode(prompt).ids, *read.ids[:-1])
        assert len(read.encoded.tokens) == len(read.encoded.words or ()) == len(read.encoded.ids)
        assert len(read.encoded.special) == len(read.encoded.offsets or ()) == len(read.encoded.ids)
        from_ids = read_answer(model, list(model.encode(prompt).ids), list(read.ids))
        assert (from_ids.text, from_ids.encoded.ids) == (answer, read.encoded.ids)
    together = read_answer(model, "the key to", " Paris Rome").encoded
    assert together.words == model.encode("the key to Paris ").words
    assert together.text == "the key to Paris Rome"


def test_an_answer_that_no_tokens_spell_is_refused() -> None:
    model = spelled_model()
    model.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(af.OptionError, match="'HE' has none that continue it by exactly this"):
        read_answer(model, "t", "HE")


def test_the_answer_of_a_chat_follows_the_generation_prompt() -> None:
    model = spelled_model()
    model.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + ' ' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' to' }}{% endif %}"
    )
    chat = [{"role": "the", "content": "key"}]
    found = af.explain(chat, model=model, answer=" Paris Rome", methods=["rollout"])
    assert found.tokens == model.encode("t key to Paris ").tokens
    assert found.tokens[found.span[0]] == "Ġto"
    assert [segment.name for segment in found.segments] == ["1 the", "(rest)"]


# ---- what is shown, and refused ------------------------------------------------------------------


def test_explanations_of_answers_are_shown_and_saved(model: Any, tmp_path: Path) -> None:
    found = explain_answer(model, methods=["rollout", "flow"], edges=["contribution", "attention"])
    assert found.summary().startswith("“4 8 6”") or found.summary().startswith("4 8 6")
    assert repr(found).startswith("<Explanation: 7 tokens, positions 4..6 of")
    assert json.loads(found.to_json())["span"] == [4, 5, 6]
    for ending in (".html", ".png", ".csv", ".npz", ".md"):
        assert found.save(tmp_path / f"answer{ending}").stat().st_size
    page = describe_explanation(found)
    assert page.span == (4, 5, 6)
    assert set(SPAN) <= set(page.tokens.asides)
    for method in page.methods:  # the page computes nothing from the last position alone
        assert method.computed is None
        assert method.graph is None
        assert method.rows is not None
        assert method.rows.positions == (6,)
    grouped = found.row("contribution flow", by_word=False)
    assert grouped.sources is not None
    assert grouped.sources[0].positions == SPAN
    events = af.explain_events(PROMPT, model=model, answer=ANSWER, methods=["rollout"])
    assert [event.span for event in events if isinstance(event, af.Predicted)] == [SPAN]


def test_weights_are_explained_from_a_span_too() -> None:
    weights = np.tril(np.ones((2, 4, 4))) / np.arange(1, 5)[:, None]
    found = af.explain(af.Attention(weights, tokens=list("abcd")), span=[1, 3])
    mean = af.rollout(weights, positions=[1, 3]).values.mean(axis=1)
    np.testing.assert_allclose(found.rollout.values[:, 0], mean)
    assert found.explained == (1, 3)
    with pytest.raises(af.OptionError, match="answer requires one"):
        af.explain(af.Attention(weights), answer=[1])


BAD: list[tuple[dict[str, Any], str]] = [
    ({"answer": ""}, "an answer must not be empty; got ''"),
    ({"answer": " \n"}, "an answer must not be empty"),
    ({"answer": []}, "an answer must have at least one token; got none"),
    ({"answer": 5}, "an answer must be a text or token ids; got 5"),
    ({"answer": ["a"]}, "an answer must be a text or token ids"),
    ({"answer": "\ud800"}, "must be Unicode"),
    ({"answer": [1], "position": 2}, "answer says what is explained, so position is not used"),
    ({"answer": [1], "target": 3}, "so target is not used; got 3"),
    ({"answer": [1], "span": [2]}, "so span is not used"),
    ({"span": [1], "position": 2}, "span says what is explained, so position is not used"),
    ({"answer": [1], "foil": af.RUNNER_UP}, "the foil of an answer is another answer, a text"),
    ({"answer": [1], "foil": 3}, "the foil of an answer is another answer, a text; got 3"),
    ({"answer": [1], "importance": ["blank_out"]}, "relevance is the only importance"),
    ({"answer": [1], "foil": "a", "edges": "signed_relevance"}, "not of the difference of two"),
    ({"span": []}, "span must have at least one position; got none"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_answers_are_refused_before_a_model_is_loaded(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        af.explain("the key", model="no such model", **options)
    assert "\n" not in str(error.value)


def test_answers_are_refused_where_a_model_cannot_give_them(model: Any) -> None:
    encoders: list[dict[str, Any]] = [{"answer": " is"}, {"span": [1]}]
    for options in encoders:
        with pytest.raises(af.OptionError, match=r"causal language model, .* got VerbNumber"):
            af.explain("the keys", **options)
    with pytest.raises(af.OptionError, match="causal language model"):
        af.relevance("verb-number", "the keys", answer=" is")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"span": [1, -4]}, "distinct"),
        ({"span": [5]}, "position must be from 0 to 4; got 5"),
        ({"answer": "a"}, "has no tokenizer"),
    ]
    for options, message in refused:
        with pytest.raises(af.OptionError, match=message):
            af.explain(PROMPT, model=model, **options)
    with pytest.raises(af.CaptureError, match="token ids"):
        af.explain(PROMPT, model=model, answer=[10**6])
    with pytest.raises(af.OptionError, match="two different answers"):
        af.explain("to", model=spelled_model(), answer=" Rome", foil=" Rome")
    with pytest.raises(af.OptionError, match="so target is not used; got 3"):
        af.relevance(model, PROMPT, 3, answer=ANSWER)


def test_answers_of_long_inputs_are_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnflow.analysis.long_inputs.ROWS_ABOVE", 7)
    assert explain_answer(model).span == SPAN
    monkeypatch.setattr("attnflow.analysis.long_inputs.ROWS_ABOVE", 6)
    with pytest.raises(af.OptionError, match="not built above 6 tokens; got 7: give the answer's"):
        explain_answer(model)


def test_answers_and_spans_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    model = spelled_model()
    model.model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    monkeypatch.setenv("COLUMNS", "150")
    given = ["explain", "the key to", "--model", str(folder)]
    assert inside(monkeypatch, *given, "--answer", " Paris Rome key", "--importance") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("Paris Rome key ")
    assert "positions 3..8, to ␣ Paris ␣ Rome ␣, read:" in shown
    assert "what Paris Rome key (logit" in shown
    assert (
        inside(
            monkeypatch,
            *given,
            "--answer",
            " Rome key",
            "--foil",
            " Paris",
            "--out",
            str(tmp_path / "a.json"),
        )
        == 0
    )
    assert json.loads((tmp_path / "a.json").read_text())["span"] == [3, 4, 5, 6]
    assert inside(monkeypatch, *given, "--span", "1,2") == 0
    assert "positions 1, 2" in capsys.readouterr().out
    assert inside(monkeypatch, *given, "--answer", " Rome", "--position", "1") == 2
    assert "so --position is not used" in capsys.readouterr().err
