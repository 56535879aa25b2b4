"""Answers that are known: one pass against the model's own steps, spans, and the way through the answer."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import attnflow as af
from attnflow.analysis.generate.spans import find_offsets, find_span
from attnflow.core.methods import roll_span
from tests.families import DECODERS, build, space_tokenizer, word_tokenizer
from tests.oracles import Floats

PROMPT = [7, 23, 41, 9, 55, 12]
ANSWER = [31, 8, 8, 44, 17, 29, 5]
SIZE = len(PROMPT)
STEPS = len(PROMPT) + len(ANSWER) - 1
CLOSE = 1e-5


@pytest.fixture(scope="module")
def story() -> af.Generation:
    model = af.Model(build("llama"))
    return af.replay(model, PROMPT, ANSWER, edges=["attention", "contribution", "gradient"])


def step_by_step(model: Any, prompt: list[int], answer: list[int]) -> tuple[list[Any], list[float]]:
    """Eager attention with a cache, one token at a time: per step and layer, [head, query, key]; and probabilities."""
    model = deepcopy(model).eval()  # transformers leaves hooks in a model that returned attention
    model.set_attn_implementation("eager")
    steps, probabilities, cache = [], [], None
    for given, new in zip([prompt, *([token] for token in answer[:-1])], answer, strict=True):
        with torch.no_grad():
            output = model(
                torch.tensor([given]), past_key_values=cache, use_cache=True, output_attentions=True
            )
        cache = output.past_key_values
        steps.append([layer[0].double().numpy() for layer in output.attentions])
        probabilities.append(float(output.logits[0, -1].double().softmax(-1)[new]))
    return steps, probabilities


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen3", "gemma2", "phi3", "opt"])
def test_a_replay_equals_cached_decoding_step_by_step(family: str) -> None:
    """A sliding window's cache holds the last keys only, so columns are counted from the last."""
    steps, probabilities = step_by_step(build(family), PROMPT, ANSWER)
    depth = len(steps[0])
    expected = np.zeros((depth, 4, STEPS, STEPS))  # [layer, head, query, key]
    for number, step in enumerate(steps):
        for weights, layer in zip(expected, step, strict=True):
            end, (_, rows, keys) = SIZE + number, layer.shape
            keys = min(keys, end)
            weights[:, end - rows : end, end - keys : end] = layer[..., :keys]
    replayed = af.replay(af.Model(build(family)), PROMPT, ANSWER, heads=None)
    np.testing.assert_allclose(replayed.attention.weights, expected, atol=CLOSE)
    np.testing.assert_allclose(replayed.probabilities, probabilities, atol=CLOSE)
    rolled = np.eye(STEPS)
    for number, layer in enumerate(expected.mean(axis=1)):
        rolled = (0.5 * layer + 0.5 * np.eye(STEPS)) @ rolled
        found = replayed.rollout().values[:, :, number]
        np.testing.assert_allclose(found, rolled[SIZE - 1 :, :SIZE], atol=CLOSE)


@pytest.mark.parametrize("family", DECODERS)
def test_what_was_generated_is_replayed_in_a_batch(family: str) -> None:
    prompts = [PROMPT, PROMPT[:2], PROMPT[1:5]]
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None}
    model = af.Model(build(family))
    generated = af.generate(model, prompts, **options)
    answers = [[int(token) for token in each.tokens] for each in generated]
    answers[1] = answers[1][:3]  # of different lengths
    for mine, other in zip(af.replay(model, prompts, answers), generated, strict=True):
        count = len(mine.tokens)
        assert mine.tokens == other.tokens[:count]
        assert (mine.prompt, mine.edges) == (other.prompt, other.edges)
        np.testing.assert_allclose(mine.probabilities, other.probabilities[:count], atol=CLOSE)
        for edges in mine.edges:
            np.testing.assert_allclose(
                mine.by("rollout", edges=edges).values,
                other.by("rollout", edges=edges).values[:count],
                atol=CLOSE,
            )


def test_a_long_answer_is_replayed_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = af.Model(build("llama"))
    edges = ["attention", "contribution"]
    short = af.replay(model, PROMPT, ANSWER, edges=edges)
    monkeypatch.setattr("attnflow.analysis.long_inputs.ROWS_ABOVE", 9)
    long = af.replay(model, PROMPT, ANSWER, edges=edges)
    assert long.captured is None
    np.testing.assert_allclose(long.probabilities, short.probabilities, atol=CLOSE)
    for kind in edges:
        for through in (False, True):
            rows, expected = (
                each.by("rollout", edges=kind, through=through).values for each in (long, short)
            )
            np.testing.assert_allclose(rows, expected, atol=1e-4)
            row, mean = (
                each.span(tokens=[1, 4], edges=kind, through=through).values
                for each in (long, short)
            )
            np.testing.assert_allclose(row, mean, atol=1e-4)


def test_value_zeroing_has_whole_layers_to_run_again() -> None:
    model = af.Model(build("gpt2"))
    found = af.replay(model, PROMPT, ANSWER, edges="value_zeroing").graphs["value_zeroing"]
    expected = af.attention_graph(model, PROMPT + ANSWER[:-1], edges="value_zeroing")
    np.testing.assert_allclose(found.edges, expected.edges, atol=CLOSE)


# ---- spans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("edges", ["attention", "contribution"])
@pytest.mark.parametrize("method", ["rollout", "raw"])
def test_a_span_is_the_mean_of_single_rows_whose_edges_sum_to_1(
    story: af.Generation, method: str, edges: str
) -> None:
    single = story.by(method, edges=edges).values
    for tokens, numbers in (
        (None, range(7)),
        (slice(2, 5), [2, 3, 4]),
        (slice(-2, None), [5, 6]),
        ([0, 6, 3], [0, 3, 6]),
    ):
        row = story.span(method, tokens=tokens, edges=edges)
        assert row.values.shape == (1, SIZE, 3)
        np.testing.assert_allclose(row.values[0], single[list(numbers)].mean(axis=0), atol=1e-6)
    assert row.generated == ("31 44 5",)
    summed = story.span(method, edges=edges, normalize="sum").values
    np.testing.assert_allclose(summed.sum(axis=1), 1, atol=1e-12)


def test_the_flow_of_a_span_is_that_from_its_positions_together(story: af.Generation) -> None:
    found = story.span("flow", tokens=[1, 4], edges="contribution").values[0]
    expected = af.flow(
        story.graphs["contribution"], layers=[1, 2, 3], sources=[[6, 9]], normalize=None
    )
    np.testing.assert_allclose(found, expected.values[:, 0, :SIZE].T, atol=1e-9)
    single = story.flow(edges="contribution").values[[1, 4]]
    assert (found >= single.max(axis=0) - 1e-9).all()
    assert (found <= single.sum(axis=0) + 1e-9).all()


def rows_of_gradients(story: af.Generation) -> Floats:
    """[generated, key, layer]: rollout on each token's own gradient edges, rows divided by their sums."""
    model, ids = af.Model(build("llama")), PROMPT + ANSWER
    rows = np.zeros((len(ANSWER), STEPS, 3))
    for number in range(len(ANSWER)):
        seen = SIZE + number
        graph = af.attention_graph(model, ids[:seen], edges="gradient", target=ids[seen])
        found = af.rollout(graph, positions=[seen - 1], normalize=None).values[:, 0]
        rows[number, :seen] = (found / found.sum(axis=1, keepdims=True)).T
    return rows


def test_rows_that_do_not_sum_to_1_are_divided_by_their_sums(story: af.Generation) -> None:
    rows = rows_of_gradients(story)
    assert np.ptp(story.by("rollout", edges="gradient").values.sum(axis=1)) > 1e-3
    row = story.span(tokens=slice(1, 4), edges="gradient").values[0]
    np.testing.assert_allclose(row, rows[1:4, :SIZE].mean(axis=0), atol=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_one_row_carried_down_is_the_mean_of_rows_of_any_edges(seed: int) -> None:
    """Rows of edges with any sums, zero among them, and of sizes beyond float64's products."""
    rng = np.random.default_rng(seed)
    size, scale = 5, [1.0, 1e3, 1e-3, 1e60, 1e-60, 1.0][seed]
    edges = np.tril(rng.random((6, size, size))) * scale
    if seed == 5:
        edges[3, 2] = 0.0  # nothing goes on from there
    graph = af.AttentionGraph(edges=edges)
    positions = [1, 2, 4]
    expected = af.rollout(graph, positions=positions).values.mean(axis=1)  # each row sums to 1
    np.testing.assert_allclose(roll_span(graph, positions), expected, atol=1e-12)
    calm = af.Attention(np.tril(np.ones((3, size, size))) / np.arange(1, size + 1)[:, None])
    expected = af.rollout(calm.graph(without=[0]), positions=positions).values.mean(axis=1)
    np.testing.assert_allclose(roll_span(calm.graph(without=[0]), positions), expected, atol=1e-12)


TEXT = " Paris, the city of light. 🗝 naïve café: “yes” isn't it"


def byte_pieces() -> Any:
    """Bytes as letters, of which a character takes up to four (GPT-2, Llama 3)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=["<end>"]
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return t.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.mark.parametrize("make", [byte_pieces, lambda: space_tokenizer([TEXT])])
def test_the_places_of_tokens_are_those_of_the_tokenizer(make: Callable[[], Any]) -> None:
    tokenizer = make()
    text = TEXT if make is byte_pieces else TEXT.strip()
    given = tokenizer(text, return_offsets_mapping=True)
    ids = given["input_ids"]
    assert tokenizer.decode(ids) == text
    offsets = find_offsets(tokenizer, [*ids, tokenizer.eos_token_id], text)
    assert offsets is not None
    assert offsets[-1] == (len(text), len(text))
    for part in ("the city of light", "Paris", "🗝", "café", "“yes”", ". 🗝 naïve", " it"):
        start = text.index(part) + len(part) - len(part.strip())
        assert find_span(part, len(ids), text, offsets) == tuple(
            number
            for number, (first, last) in enumerate(given["offset_mapping"])
            if first < start + len(part.strip()) and last > start
        )
    assert find_offsets(tokenizer, ids, "another text") is None


def test_a_span_may_be_given_as_text() -> None:
    story = af.replay(af.Model(build("llama"), word_tokenizer()), PROMPT, [5, 6, 7, 5, 8, 3])
    assert story.text == "the key to the cabinets"
    for part, numbers in (("to the", [2, 3]), ("the key", [0, 1]), (" cabinets", [4])):
        found = story.span(tokens=part)
        expected = story.rollout().values[numbers].mean(axis=0)
        np.testing.assert_allclose(found.values[0], expected, atol=1e-6)
        assert found.generated == (part.strip(),)
    wrong = {"Rome": "does not stand", "": "does not", " ": "does not", "the": "2 times"}
    for part, why in wrong.items():
        with pytest.raises(af.OptionError, match=f"a part of the generated text .*{why}"):
            story.span(tokens=part)


# ---- through the answer --------------------------------------------------------------------------


def walk(rows: Floats, number: int) -> tuple[Floats, Floats]:
    """Every chain of generated tokens by recursion: what of a row [generated, key] ends on each prompt token, and what
    passes through each generated token.
    """
    reached, passed = rows[number, :SIZE].copy(), np.eye(len(rows))[number]
    for earlier in range(number):
        share = rows[number, SIZE + earlier]
        further, others = walk(rows, earlier)
        reached, passed = reached + share * further, passed + share * others
    return reached, passed


@pytest.mark.parametrize("edges", ["attention", "contribution", "gradient"])
def test_through_the_answer_is_the_sum_over_all_chains(story: af.Generation, edges: str) -> None:
    if edges == "gradient":
        rows = rows_of_gradients(story)
    else:
        graph = story.graphs[edges]
        rolled = af.rollout(graph, positions=list(story.positions)).values  # [layer, query, key]
        rows = rolled.transpose(1, 2, 0)
    result = story.by("rollout", edges=edges, through=True)
    assert result.passed is not None
    for layer in range(3):
        for number in range(len(ANSWER)):
            reached, passed = walk(rows[:, :, layer], number)
            np.testing.assert_allclose(result.values[number, :, layer], reached, atol=1e-6)
            np.testing.assert_allclose(result.passed[number, :, layer], passed, atol=1e-6)
    np.testing.assert_allclose(result.values.sum(axis=1), 1, atol=1e-9)
    assert result.answer == story.tokens
    row = story.span(tokens=[1, 4], edges=edges, through=True)
    np.testing.assert_allclose(row.values[0], result.values[[1, 4]].mean(axis=0), atol=1e-9)
    assert row.passed is not None
    np.testing.assert_allclose(row.passed[0], result.passed[[1, 4], :5].mean(axis=0), atol=1e-9)


def test_a_chain_is_seen_in_what_passed() -> None:
    """The last token reads only the first generated one, which reads only one token of the prompt."""
    weights = np.eye(5)[None]  # prompt of 3; positions 2, 3, 4 predict
    weights[0, 2] = [0, 1, 0, 0, 0]
    weights[0, 4] = [0, 0, 0, 1, 0]
    made = af.Generation(
        text="",
        tokens=("x", "y", "z"),
        probabilities=(1.0, 1.0, 1.0),
        prompt=("a", "b", "c"),
        captured=af.Attention(weights),
    )
    result = made.raw(through=True)
    assert result.values[2, :, 0].tolist() == [0, 1, 0]
    assert result.passed is not None
    assert result.passed[2, :, 0].tolist() == [1, 0, 1]
    assert made.raw().values[2].sum() == 0


def test_a_result_through_the_answer_saves_what_passed(
    story: af.Generation, tmp_path: Path
) -> None:
    result = story.by("rollout", through=True)
    assert result.method == "rollout through the answer"
    assert result.passed is not None
    content = json.loads(result.save(tmp_path / "through.json").read_text())
    assert np.array_equal(content["passed"], result.passed)
    assert content["answer"] == list(story.tokens)
    assert np.array_equal(np.load(result.save(tmp_path / "through.npz"))["passed"], result.passed)
    assert np.array_equal(result.at_layer(2).passed, result.passed[:, :, [1]])  # type: ignore[arg-type]
    assert af.figures.generation(story.span()).save(tmp_path / "span.png").stat().st_size > 1000


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "answer", "message"),
    [
        (PROMPT, [], "answer_ids must have at least one token; got none"),
        (
            PROMPT,
            [5, 60],
            "must be token ids from 0 to 59, the vocabulary of LlamaForCausalLM; got 60",
        ),
        (PROMPT, [-1], "must be token ids from 0 to 59, .* got -1"),
        (PROMPT, "Paris", "got a text, which may have been other tokens: give its ids"),
        (PROMPT, [1.5], r"must be token ids, whole numbers in a list; got \[1.5\]"),
        (PROMPT, [[5], [6]], r"must be token ids, whole numbers in a list; got \[\[5\], \[6\]\]"),
        (PROMPT, None, "must be token ids, whole numbers in a list; got None"),
        (PROMPT, 5, "must be token ids, whole numbers in a list; got 5"),
        (PROMPT, [5] * 35, "at most 40 tokens; got a prompt of 6 and an answer of 35"),
        ([PROMPT, PROMPT], [ANSWER], "ids of one answer per prompt, here 2; got 1"),
        ([PROMPT, PROMPT], ANSWER, "ids of one answer per prompt, here 2; got 7"),
        ([PROMPT, PROMPT], [ANSWER, []], r"answer_ids\[1\] must have at least one token"),
        ([PROMPT, PROMPT], None, "ids of one answer per prompt, here 2; got NoneType"),
        ([], [], "replay needs at least one prompt"),
    ],
)
def test_a_bad_answer_gets_one_clear_line(prompt: Any, answer: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        af.replay(build("llama"), prompt, answer)
    assert "\n" not in str(error.value)


def test_arrays_and_tensors_of_ids_are_answers_too(story: af.Generation) -> None:
    for answer in (tuple(ANSWER), np.array(ANSWER), torch.tensor(ANSWER), torch.tensor([ANSWER])):
        assert af.replay(build("llama"), PROMPT, answer, edges="attention").tokens == story.tokens


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda story: story.span(tokens=slice(7, 9)),
            r"one of the 7 generated tokens; got slice\(7",
        ),
        (lambda story: story.span(tokens=slice(3, 9)), r"the 7 generated tokens; got slice\(3, 9"),
        (lambda story: story.span(tokens=slice(3, 3)), "at least one of the 7 generated tokens"),
        (lambda story: story.span(tokens=slice("a", None)), "must be a slice with at least one"),
        (lambda story: story.span(tokens=[7]), "tokens must be from -7 to 6; got 7"),
        (lambda story: story.span(tokens=[]), "at least one generated token; got none"),
        (lambda story: story.span(tokens="Paris"), "places of tokens .* are unknown here"),
        (lambda story: story.span("flow", edges="gradient"), "needs one graph, .*: take rollout"),
        (lambda story: story.span("flow", through=True), "flows do not; got method='flow'"),
        (lambda story: story.flow(through=True), "flows do not; got method='flow': take rollout"),
        (
            lambda story: story.rollout(through=True, normalize="receptive_field"),
            "rows that sum to 1; got normalize='receptive_field'",
        ),
        (lambda story: story.span(edges="norm"), "this generation has no edges 'norm'"),
        (lambda story: story.span(without=[7]), "positions that predicted, 5..11; got"),
    ],
)
def test_a_bad_span_gets_one_clear_line(story: af.Generation, ask: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        ask(story)
    assert "\n" not in str(error.value)


def test_rows_with_signs_are_no_shares() -> None:
    model = af.Model(build("llama"))
    story = af.replay(model, PROMPT, ANSWER[:3], edges="signed_relevance")
    for through in (False, True):
        with pytest.raises(af.OptionError, match="rows with negative values are no shares"):
            story.span(edges="signed_relevance", through=through)
