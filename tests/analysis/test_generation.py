"""M[generated, prompt, layer] while a model generates: the same as from one pass over the finished text, and by the plain formula."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import attnflow as af
from tests.families import DECODERS, build, word_tokenizer
from tests.oracles import Floats

PROMPT = [7, 23, 41, 9, 55, 12]
CLOSE = 1e-4


def story(family: str, prompt: Any = PROMPT, **options: Any) -> af.Generation:
    return af.generate(  # type: ignore[no-any-return]
        af.Model(build(family)), prompt, **{"max_new_tokens": 9, "eos_token_id": None, **options}
    )


def full_pass(family: str, generation: af.Generation, heads: str | None = "mean") -> af.Attention:
    """The attention of one pass over the prompt and all generated tokens but the last."""
    ids = [int(token) for token in (*generation.prompt, *generation.tokens[:-1])]
    return af.capture(af.Model(build(family)), ids, heads=heads)


@pytest.mark.parametrize("family", DECODERS)
def test_m_equals_one_pass_over_the_finished_text(family: str) -> None:
    """Nine tokens after six: past the sliding window of four that some of the families have."""
    generation = story(family)
    attention = full_pass(family, generation)
    m = len(PROMPT)
    for name in ("raw", "rollout", "flow"):
        values = getattr(generation, name)().values
        whole = af.METHODS[name](
            attention, layers=range(1, 4), normalize=None
        ).values  # [layer, position, position]
        assert values.shape == (9, m, 3)
        assert np.abs(values - whole[:, m - 1 :, :m].transpose(1, 2, 0)).max() < CLOSE


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("heads", ["mean", "max", "min", None])
def test_generation_keeps_all_that_one_pass_keeps(family: str, heads: str | None) -> None:
    """Weights of every head, windows, sinks, and so the receptive field."""
    generation = story(family, heads=heads)
    attention = full_pass(family, generation, heads)
    assert generation.attention.window == attention.window
    assert generation.attention.fused == heads
    assert np.abs(generation.attention.weights - attention.weights).max() < CLOSE
    assert (generation.attention.no_token_share is None) == (attention.no_token_share is None)
    if attention.no_token_share is not None and generation.attention.no_token_share is not None:
        assert np.abs(generation.attention.no_token_share - attention.no_token_share).max() < CLOSE
    m = len(PROMPT)
    values = generation.rollout(normalize="receptive_field").values
    graph = attention.graph()
    plain, even = (
        af.rollout(each, normalize=None).values[:, m - 1 :, :m].transpose(1, 2, 0)
        for each in (graph, graph.uniform())
    )
    relative = np.divide(plain, even, out=np.zeros_like(plain), where=even > 0)
    sums = relative.sum(axis=1, keepdims=True)
    relative = np.divide(relative, sums, out=np.zeros_like(plain), where=sums > 0)
    assert np.abs(values - relative).max() < 1e-3


@pytest.mark.parametrize("way", ["int", "list", "tensor", "config", "own config"])
def test_padding_is_never_counted_as_generated(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two prompts one ends early, however the end is named."""
    whole = [story("llama", prompt) for prompt in (PROMPT, PROMPT[:3])]
    stop = next(int(token) for token in whole[0].tokens if token not in whole[1].tokens)
    model = build("llama")
    ways: dict[str, dict[str, Any]] = {
        "int": {"eos_token_id": stop},
        "list": {"eos_token_id": [stop, 3]},
        "tensor": {"eos_token_id": torch.tensor([stop])},
        "config": {"generation_config": t.GenerationConfig(eos_token_id=[stop])},
        "own config": {},
    }
    if way == "own config":
        monkeypatch.setattr(model.generation_config, "eos_token_id", stop)
    batch = af.generate(model, [PROMPT, PROMPT[:3]], max_new_tokens=9, **ways[way])
    first = whole[0].tokens.index(str(stop)) + 1
    assert batch[0].tokens == whole[0].tokens[:first]
    assert batch[0].rollout().values.shape == (first, len(PROMPT), 3)
    assert batch[1].tokens == whole[1].tokens


def test_a_real_token_that_is_also_the_padding_is_kept() -> None:
    """Every token is the padding, here by force; none of them waited for anything."""
    force = t.LogitsProcessorList(
        [lambda ids, scores: scores.index_fill(1, torch.tensor([1]), 1e4)]
    )
    for prompt in (PROMPT, [PROMPT, PROMPT[:2]]):
        found = story("gpt2", prompt, logits_processor=force, max_new_tokens=4)
        stories = found if isinstance(found, list) else [found]
        assert [len(each.tokens) for each in stories] == [4] * len(stories)


@pytest.mark.parametrize("name", ["num_return_sequences", "guidance_scale"])
def test_what_a_model_itself_is_set_to_is_checked_too(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build("llama").generation_config, name, 2)
    with pytest.raises(af.OptionError, match=name):
        story("llama")


def test_a_sequence_that_ended_by_a_stop_string_has_no_padding_either() -> None:
    tokenizer, model = word_tokenizer(), build("gpt2")
    whole = [story("gpt2", prompt) for prompt in (PROMPT, PROMPT[:3])]
    unused = next(
        each for each in range(5, 60) if not any(str(each) in story.tokens for story in whole)
    )

    class Stop(t.StoppingCriteria):
        """The first sequence ends after four tokens."""

        def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
            done = torch.zeros(len(ids), dtype=torch.bool)
            done[0] = ids.shape[1] >= len(PROMPT) + 4
            return done

    found = af.generate(
        af.Model(model, tokenizer),
        [PROMPT, PROMPT[:3]],
        max_new_tokens=9,
        eos_token_id=unused,  # without one, transformers lets every sequence go on
        stopping_criteria=t.StoppingCriteriaList([Stop()]),
    )
    assert [len(each.tokens) for each in found] == [4, 9]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_m_is_the_stacked_slice_of_each_steps_rollout(family: str) -> None:
    """The plain formula: at every step, a rollout of the whole sequence so far, its last row, cut to the prompt."""
    generation = story(family)
    model, m = af.Model(build(family)), len(PROMPT)
    ids = [int(token) for token in (*generation.prompt, *generation.tokens[:-1])]
    steps: list[Floats] = []
    for end in range(m, m + 9):
        rolled = af.rollout(
            af.capture(model, ids[:end]), normalize=None
        ).values  # [layer, position, position]
        steps.append(rolled[:, -1, :m].T)
    assert np.abs(generation.rollout().values - np.stack(steps)).max() < CLOSE


@pytest.mark.parametrize("family", DECODERS)
def test_prompts_of_a_list_give_what_each_gives_alone(family: str) -> None:
    prompts = [PROMPT, PROMPT[:2], PROMPT[1:5]]
    together = story(family, prompts)
    for prompt, generation in zip(prompts, together, strict=True):  # type: ignore[call-overload]
        alone = story(family, prompt)
        assert generation.tokens == alone.tokens
        assert np.abs(generation.rollout().values - alone.rollout().values).max() < CLOSE
        assert np.allclose(generation.probabilities, alone.probabilities, atol=CLOSE)


def test_tokens_and_probabilities_are_the_models_own() -> None:
    model = build("llama")
    generation = story("llama")
    with torch.no_grad():
        plain = model.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=9,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=1,
        )[0, len(PROMPT) :]
        logits = model(torch.tensor([[*PROMPT, *plain[:-1].tolist()]])).logits[0, len(PROMPT) - 1 :]
    assert [int(token) for token in generation.tokens] == plain.tolist()
    expected = logits.softmax(dim=-1).gather(1, plain[:, None])[:, 0]
    assert np.allclose(generation.probabilities, expected.numpy(), atol=1e-5)


def test_a_stop_token_ends_the_generation() -> None:
    whole = story("llama")
    stop = int(whole.tokens[3])
    first = whole.tokens.index(str(stop))
    short = story("llama", eos_token_id=stop)
    assert short.tokens == whole.tokens[: first + 1]
    assert short.rollout().values.shape == (first + 1, len(PROMPT), 3)
    batch = story("llama", [PROMPT, PROMPT[:3]], eos_token_id=stop)
    assert batch[0].tokens == short.tokens  # type: ignore[index]


def test_sampling_follows_its_seed() -> None:
    build("gpt2")  # which sets the seed itself when first called

    def sampled() -> af.Generation:
        torch.manual_seed(5)
        return story("gpt2", do_sample=True, temperature=3.0)

    assert sampled().tokens == sampled().tokens
    assert sampled().tokens != story("gpt2").tokens


def test_one_token_after_one_token() -> None:
    generation = story("llama", [PROMPT[0]], max_new_tokens=1)
    assert generation.rollout().values.tolist() == [[[1.0, 1.0, 1.0]]]
    assert generation.attention.size == 1


def test_normalisations() -> None:
    generation = story("gpt2")
    plain, summed = generation.rollout().values, generation.rollout(normalize="sum").values
    assert np.abs(summed - plain / plain.sum(axis=1, keepdims=True)).max() < 1e-12
    graph = generation.attention.graph()
    field = (
        af.rollout(graph.uniform(), normalize=None)
        .values[:, len(PROMPT) - 1 :, : len(PROMPT)]
        .transpose(1, 2, 0)
    )
    relative = plain / field
    expected = relative / relative.sum(axis=1, keepdims=True)
    assert np.abs(generation.rollout(normalize="receptive_field").values - expected).max() < 1e-12
    calm = generation.rollout(without=[0], residual=0.3).values
    assert (calm[:, 0] == 0).all()
    assert (np.asarray(generation.flow()) == generation.flow().values).all()


def test_filtering_takes_common_words_punctuation_and_special_tokens_out() -> None:
    values = np.random.default_rng(0).random((2, 6, 3))
    result = af.PromptAttention(
        values,
        "rollout",
        ("<s>", "ĠThe", "Ġkey", ",", "Ġof", "Ġoak"),
        ("a", "b"),
        (1, 2, 3),
        frozenset(["<s>"]),
    )
    filtered = result.filtered()
    assert filtered.prompt == ("Ġkey", "Ġoak")
    assert np.abs(filtered.values.sum(axis=1) - 1).max() < 1e-12
    assert (
        np.abs(filtered.values[:, 0] / filtered.values[:, 1] - values[:, 2] / values[:, 5]).max()
        < 1e-9
    )
    assert result.filtered(words=(), punctuation=False, special=False).prompt == result.prompt
    assert result.filtered(words=["key"], punctuation=False).prompt == ("ĠThe", ",", "Ġof", "Ġoak")
    with pytest.raises(af.OptionError, match="leave at least one prompt token"):
        result.filtered(words=["the", "key", "of", "oak"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: story("llama", heads="sum"), "unknown heads 'sum'"),
        (lambda: story("llama", generation_config={"num_beams": 2}), "must be a GenerationConfig"),
        (lambda: story("llama", inputs_embeds=torch.zeros(1, 2, 32)), "takes no inputs_embeds"),
        (lambda: story("llama", custom_generate="somebody/code"), "takes no custom_generate"),
        (
            lambda: story("llama", max_new_tokens=0),
            "max_new_tokens must be a whole number, at least 1; got 0",
        ),
        (lambda: story("llama", num_return_sequences=2), "num_return_sequences must be 1; got 2"),
        (
            lambda: story("llama", max_new_tokens=35),
            "at most 40 tokens; got a prompt of 6 and max_new_tokens=35",
        ),
        (
            lambda: af.generate(build("bert"), PROMPT),
            "generate needs a causal LM; BertModel is for encoder",
        ),
        (lambda: story("llama", "a text"), "no tokenizer"),
        (lambda: story("llama", nonsense=3), "cannot generate: .*nonsense"),
        (lambda: story("llama", [{"role": "user", "content": "hello"}]), "chat template"),
        (lambda: story("llama").rollout(normalize="max"), "unknown normalize 'max'"),
        (
            lambda: story("llama").rollout(without=[7]),
            "without must leave the positions that predicted",
        ),
    ],
)
def test_bad_input_gets_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
