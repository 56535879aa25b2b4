"""Interventions against eager attention with an edited mask, zeroed projections, and causality."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.analysis.page.strips import describe_intervention
from attnflow.capturing.capture import read_arguments
from attnflow.capturing.change import run_changed
from attnflow.models.attention_calls import intercept_attention
from tests.families import FAMILIES, OUTSIDE, PAIRS, VISION, build, make_input, word_tokenizer

INSIDE = [name for name in FAMILIES if name not in OUTSIDE]
STACKS = [name for name in INSIDE if name not in PAIRS]
SENTENCE = "the keys to the cabinet"


def make_model(family: str, implementation: str | None = None) -> af.Model:
    position = 3 if family == "modernbert" else None  # has no mask in the ids that it reads here
    return af.Model(build(family, implementation), position=position)


def read_logits(model: af.Model, family: str) -> torch.Tensor:
    """The scores (or last states) of the plain model, without attnflow."""
    arguments = read_arguments(model, [model.encode(make_input(family))])
    with torch.no_grad():
        output = model.model(**arguments)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def list_visible(attention: af.Attention, seed: int, count: int) -> list[tuple[int, int, int]]:
    """Random edges (layer, query, key) that attention has, each row keeping its own key."""
    rng = np.random.default_rng(seed)
    present = np.argwhere(attention.weights[:, 0] > 0)
    kept = [tuple(map(int, each)) for each in present if each[1] != each[2]]
    chosen = rng.choice(len(kept), count, replace=False)
    return [(kept[at][0] + 1, *kept[at][1:]) for at in chosen]


@contextmanager
def edited_masks(
    edges: Sequence[tuple[int, int, int, int | None]],
) -> Iterator[list[torch.Tensor]]:
    """Eager attention with the lowest number in its mask at (call, query, key, head); its weights."""
    weights: list[torch.Tensor] = []

    def attend(
        function: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any
    ) -> Any:
        call = len(weights)
        lowest = torch.finfo(query.dtype).min
        whole = torch.zeros(*query.shape[:3], key.shape[2])
        if mask is not None:
            whole += mask if mask.dtype != torch.bool else torch.where(mask, 0.0, lowest)
        for number, row, column, head in edges:
            if number == call:
                whole[:, slice(None) if head is None else head, row, column] = lowest
        output, given = function.compute(module, query, key, value, whole, **options)
        weights.append(given)
        return output, given

    with intercept_attention(attend):
        yield weights


# ---- nothing changed, and edges that are cut ----------------------------------------------------


@pytest.mark.parametrize("family", INSIDE)
def test_nothing_changed_is_equal_to_the_last_bit(family: str) -> None:
    model, value = make_model(family), make_input(family)
    encoded = model.encode(value)
    passed, _ = run_changed(model, [encoded], [{}], [model.logit_position(encoded)], [()])
    plain = af.capture(model, value)
    assert np.array_equal(passed.attentions[0].weights, plain.weights)
    result = af.intervene(model, value)
    assert np.array_equal(result.after.attention.weights, plain.weights)
    assert result.before.logit == result.after.logit
    assert result.probability_change in (0.0, None)
    if model.predicts:
        with torch.no_grad():
            scores = model.logits(model.batch([encoded]), [model.logit_position(encoded)])
        assert result.before.prediction is not None
        assert result.before.logit == float(scores[0, result.before.prediction.target.number])


@pytest.mark.parametrize("family", STACKS)
@pytest.mark.parametrize("head", [None, 2])
def test_cut_edges_equal_eager_attention_with_an_edited_mask(family: str, head: int | None) -> None:
    fused, value = make_model(family), make_input(family)
    edges = list_visible(af.capture(fused, value), 3, 9)
    given = [edge if head is None else (*edge, head) for edge in edges]
    result = af.intervene(fused, value, cut=given)
    eager = make_model(family, "eager")
    with edited_masks([(layer - 1, query, key, head) for layer, query, key in edges]) as weights:
        scores = read_logits(eager, family)
    rows = torch.cat(weights)  # [layer, head, query, key]
    rows = rows / rows.sum(dim=-1, keepdim=True)  # gpt-oss: without the share of no token
    found = rows.mean(dim=1).numpy()
    assert result.after.attention.weights[:, 0] == pytest.approx(found, abs=2e-5)
    for layer, query, key in edges:
        cut = result.after.attention.weights[layer - 1, 0, query, key]
        assert (cut == 0) == (head is None)
    if result.after.prediction is not None:
        row = (
            scores[0, eager.logit_position(eager.encode(value))] if scores.ndim == 3 else scores[0]
        )
        target = result.after.prediction.target.number
        assert result.after.logit == pytest.approx(float(row[target]), abs=2e-4)
        assert result.logit_change is not None
        assert abs(result.logit_change) > 1e-3


@pytest.mark.parametrize("family", list(PAIRS))
def test_cut_edges_of_encoder_decoders_equal_eager_attention(family: str) -> None:
    fused, value = make_model(family), make_input(family)
    encoded = fused.encode(value)
    start = len(encoded.ids)
    attention = af.capture(fused, value)
    names = attention.layer_names
    assert names is not None
    encoder = [n for n, name in enumerate(names, start=1) if name.startswith("encoder")]
    cross = [n for n, name in enumerate(names, start=1) if name.endswith("cross")]
    edges = [(encoder[0], 2, 4), (cross[1], start, 3), (cross[2], start, 5)]
    # the model calls its encoder, and then self- and cross-attention of each decoder layer
    calls = [(encoder[0] - 1, 2, 4, None), (cross[1] - 1, 0, 3, None), (cross[2] - 1, 0, 5, None)]
    result = af.intervene(fused, value, cut=edges)
    eager = make_model(family, "eager")
    with edited_masks(calls) as weights:
        scores = read_logits(eager, family)
    assert result.after.prediction is not None
    target = result.after.prediction.target.number
    assert result.after.logit == pytest.approx(float(scores[0, 0, target]), abs=2e-4)
    assert result.after.attention.weights[cross[1] - 1, 0, start, :start] == pytest.approx(
        weights[cross[1] - 1][0].mean(dim=0)[0].numpy(), abs=1e-5
    )


def test_a_row_that_loses_every_key_has_an_attention_output_of_zero() -> None:
    family, layer, query = "llama", 2, 4
    model, value = make_model(family), make_input(family)
    result = af.intervene(model, value, cut=[(layer, query, key) for key in range(query + 1)])
    project = model.model.model.layers[layer - 1].self_attn.o_proj

    def clear(module: Any, given: Any) -> Any:
        given[0][:, query] = 0.0
        return given

    handle = project.register_forward_pre_hook(clear)
    try:
        scores = read_logits(model, family)[0, -1]
    finally:
        handle.remove()
    assert result.after.prediction is not None
    assert result.after.logit == pytest.approx(
        float(scores[result.after.prediction.target.number]),
        abs=1e-5,
    )
    row = result.after.attention.weights[layer - 1, 0, query]
    assert row.tolist() == np.eye(len(row))[query].tolist()  # the residual alone is left


@pytest.mark.parametrize("family", STACKS)
def test_a_cut_changes_nothing_below_it_and_nothing_at_earlier_positions(family: str) -> None:
    model, value = make_model(family), make_input(family)
    plain = af.capture(model, value)
    layer, query, key = max(list_visible(plain, 5, 12))
    after = af.intervene(model, value, cut=[(layer, query, key)]).after.attention.weights[:, 0]
    before = plain.weights[:, 0]
    assert np.array_equal(after[: layer - 1], before[: layer - 1])
    others = [row for row in range(plain.size) if row != query]
    assert np.array_equal(after[layer - 1, others], before[layer - 1, others])
    assert not np.array_equal(after[layer - 1, query], before[layer - 1, query])
    if plain.causal:
        assert np.array_equal(after[:, :query], before[:, :query])


def test_two_cuts_at_once_are_both_cuts_and_a_batch_is_one_by_one() -> None:
    model, value = make_model("gpt2"), make_input("gpt2")
    first, second = [(1, 4, 2), (2, 6, 1)], [(2, 6, 3, 0), (3, 5, 5)]
    changes = [
        af.Change(cut=first),
        af.Change(cut=[*first, *second]),
        af.Change(blank=[2], cut=second, heads_off=[(1, 3)]),
        af.Change(),
    ]
    together = af.intervene(model, value, changes, replacement=9)
    for change, found in zip(changes, together, strict=True):
        alone = af.intervene(model, value, change, replacement=9)
        assert found.after.logit == pytest.approx(alone.after.logit, abs=1e-5)
        assert found.after.attention.weights == pytest.approx(
            alone.after.attention.weights, abs=1e-6
        )
        assert found.change == alone.change
    both = af.intervene(model, value, cut=[*first, *second])
    assert both.after.logit == pytest.approx(together[1].after.logit, abs=1e-5)


def test_threads_cut_their_own_edges() -> None:
    model, value = make_model("llama"), make_input("llama")
    cuts = [[(layer, 6, key)] for layer in (1, 2, 3) for key in (1, 4)]
    alone = [af.intervene(model, value, cut=cut).after.logit for cut in cuts]
    found: dict[int, float | None] = {}

    def work(number: int) -> None:
        found[number] = af.intervene(model, value, cut=cuts[number]).after.logit

    threads = [threading.Thread(target=work, args=[number]) for number in range(len(cuts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(cuts))] == alone


# ---- heads --------------------------------------------------------------------------------------

LAYERS: dict[str, Callable[[Any], Any]] = {
    "llama": lambda model: [layer.self_attn.o_proj for layer in model.model.layers],
    "bert": lambda model: [layer.attention.output.dense for layer in model.encoder.layer],
    "gpt-oss": lambda model: [layer.self_attn.o_proj for layer in model.model.layers],
    "opt": lambda model: [layer.self_attn.out_proj for layer in model.model.decoder.layers],
}


@pytest.mark.parametrize("family", list(LAYERS))
@pytest.mark.parametrize("is_mean", [False, True])
def test_heads_off_equal_zeroed_output_projections(family: str, is_mean: bool) -> None:
    model, value = make_model(family), make_input(family)
    off, reference = [(1, 0), (2, 1), (2, 3)], [[8, 9, 10, 11], [12, 13]]
    result = af.intervene(model, value, heads_off=off, reference=reference if is_mean else None)
    width = model.model.config.hidden_size // 4
    projections = LAYERS[family](model.model)
    seen: list[torch.Tensor] = []

    def keep(module: Any, given: Any) -> None:
        seen.append(given[0].reshape(-1, 4, width).clone())

    means: list[torch.Tensor] = []
    if is_mean:
        for layer in range(2):
            seen.clear()
            handle = projections[layer].register_forward_pre_hook(keep)
            for ids in reference:
                with torch.no_grad():
                    model.model(input_ids=torch.tensor([ids]))
            handle.remove()
            means.append(torch.cat(seen).mean(dim=0))
    handles = []
    for layer in (1, 2):
        heads = [head for number, head in off if number == layer]

        def replace(module: Any, given: Any, heads: Any = heads, layer: int = layer) -> Any:
            state = given[0].reshape(*given[0].shape[:2], 4, width).clone()
            for head in heads:
                state[:, :, head] = means[layer - 1][head] if is_mean else 0.0
            return (state.reshape(given[0].shape),)

        handles.append(projections[layer - 1].register_forward_pre_hook(replace))
    try:
        scores = read_logits(model, family)[0]
        weights = af.capture(model, value, heads=None).weights
    finally:
        for handle in handles:
            handle.remove()
    left = weights[1][[0, 2]].mean(axis=0)  # heads that are on, of layer 2
    assert result.after.attention.weights[1, 0] == pytest.approx(left, abs=1e-5)
    if result.after.prediction is not None:
        target = result.after.prediction.target.number
        assert result.after.logit == pytest.approx(float(scores[-1, target]), abs=1e-5)
        assert abs(result.logit_change or 0) > 1e-3


# ---- blanked tokens, targets, flows --------------------------------------------------------------


@pytest.mark.parametrize("replacement", [None, "attention", "[PAD]", 4])
def test_blanked_tokens_equal_blank_out(replacement: str | int | None) -> None:
    expected = af.blank_out("verb-number", SENTENCE, signed=True, replacement=replacement)
    changes = [af.Change(blank=[place]) for place in range(6)]
    found = af.intervene("verb-number", SENTENCE, changes, replacement=replacement)
    changes_of = [-(each.probability_change or 0.0) for each in found]
    assert changes_of == pytest.approx(expected.values.tolist(), abs=1e-6)
    words = af.intervene("verb-number", SENTENCE, blank=["keys", (3, 5)], replacement=replacement)
    by_place = af.intervene("verb-number", SENTENCE, blank=[2, 3, -2], replacement=replacement)
    assert words.change.blanked == by_place.change.blanked == (2, 3, 4)
    assert words.after.logit == by_place.after.logit


def test_a_word_of_several_tokens_is_blanked_as_a_whole() -> None:
    model = af.Model(build("bert"), word_tokenizer())
    assert af.intervene(model, "the key is lost here", blank="key is").change.blanked == (2, 3)
    assert af.intervene(model, "the key is lost", blank="key").before.prediction is None


@pytest.mark.parametrize("family", OUTSIDE)
def test_families_outside_the_interface_take_blanks_and_are_refused_by_name(family: str) -> None:
    model, value = make_model(family), make_input(family)
    result = af.intervene(model, value, blank=[2], replacement=9)
    changed = af.capture(model, [*value[:2], 9, *value[3:]])
    assert result.after.attention.weights == pytest.approx(changed.weights, abs=1e-6)
    with pytest.raises(af.CaptureError, match=f"{model.name} .* outside .* interface"):
        af.intervene(model, value, heads_off=[(1, 0)])


def test_targets_and_foils_are_watched_before_and_after() -> None:
    result = af.intervene("verb-number", SENTENCE, blank="keys", target="plural", foil="singular")
    scores = []
    for blanked in (False, True):
        model = af.load("verb-number")
        encoded = model.encode(SENTENCE)
        batch = model.batch([encoded])
        if blanked:
            batch["input_ids"][0, 2] = model.tokenizer.unk_token_id
        with torch.no_grad():
            logits = model.logits(batch, [0])[0]
        scores.append(float(logits[1] - logits[0]))
    assert result.logit_change == pytest.approx(scores[1] - scores[0], abs=1e-5)
    assert result.before.prediction is not None
    assert result.before.prediction.foil is not None
    assert result.before.prediction.foil.label == "singular"
    runner = af.intervene("verb-number", SENTENCE, blank="keys", foil=af.RUNNER_UP)
    assert runner.logit_change == pytest.approx(result.logit_change, abs=1e-6)


@pytest.mark.parametrize("target", [(0, 2), (0, 1), (4, 3)])
def test_the_minimum_cut_of_a_flow_is_cut_and_its_residual_share_reported(
    target: tuple[int, int],
) -> None:
    attention = af.capture("verb-number", SENTENCE)
    best = af.max_flow(attention, source=(6, 0), target=target)
    result = af.intervene("verb-number", SENTENCE, cut=best)
    assert set(result.change.cut) == set(best.cut)
    for layer, query, key in best.cut:
        row = result.after.attention.weights[layer - 1, 0, query]
        has_lost_all = {(layer, query, each) for each in range(6)} <= set(best.cut)
        assert row[key] == (1.0 if has_lost_all and key == query else 0.0)
    capacities = attention.graph().edges
    own = [(n, q) for n, q, k in best.cut if q == k]
    whole = sum(capacities[n - 1, q, k] for n, q, k in best.cut)
    assert whole == pytest.approx(best.value)
    assert result.change.residual_share == pytest.approx(0.5 * len(own) / whole)
    assert af.intervene("verb-number", SENTENCE, cut=[(1, 0, 2)]).change.residual_share is None


def test_a_flow_of_an_encoder_decoder_leaves_what_it_does_not_attend() -> None:
    model, value = make_model("bart"), make_input("bart")
    attention = af.capture(model, value)
    start = len(model.encode(value).ids)
    best = af.max_flow(attention, source=(attention.depth, start), target=(0, start))
    result = af.intervene(model, value, cut=best)
    share = result.change.residual_share
    assert share is not None
    assert 0.5 <= share <= 1.0
    for layer, query, key in result.change.cut:
        assert attention.layer_names is not None
        name = attention.layer_names[layer - 1]
        assert not name.endswith("cross") or key < start <= query


def test_encoder_decoders_take_blanks_in_the_encoder() -> None:
    model, value = make_model("t5"), make_input("t5")
    found = af.intervene(model, value, blank=[2], replacement=9)
    assert found.before.prediction is not None
    target = found.before.prediction.target.number
    expected = af.intervene(model, [*value[:2], 9, *value[3:]], target=target)
    assert found.after.logit == pytest.approx(expected.before.logit, abs=1e-5)
    hidden = af.intervene(model, value, blank=[2], replacement="attention").after.attention
    assert not hidden.weights[:, 0, [0, 1, 3, 4, 5, 6, 7], 2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits(dtype: torch.dtype) -> None:
    model, value = af.Model(deepcopy(build("llama")).to(dtype)), make_input("llama")
    plain = af.capture(model, value)
    same = af.intervene(model, value)
    assert same.before.logit == same.after.logit
    assert np.array_equal(same.after.attention.weights, plain.weights)
    cut = [(2, 5, 3), (3, 6, 1, 0)]
    found = af.intervene(model, value, cut=cut)
    exact = af.intervene(make_model("llama"), value, cut=cut)
    assert found.logit_change == pytest.approx(exact.logit_change, abs=0.1)


# ---- while a model generates ---------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "gpt-oss"])
def test_generation_with_changes_equals_one_pass_per_token(family: str) -> None:
    model, prompt, count = make_model(family), make_input(family, 6), 4
    # edges of the prompt, and of the positions that are generated
    edges = [(1, 5, 3), (2, 4, 2, 1), (1, 6, 4), (3, 7, 6), (2, 8, 8), (3, 8, 7, 0)]
    change = af.Change(cut=edges, heads_off=[(1, 2), (3, 0)])
    several = [change, af.Change(), af.Change(blank=[2], heads_off=[(2, 3)])]
    found = af.intervene(model, prompt, several, replacement=9, max_new_tokens=count)
    for each, result in zip(several, found, strict=True):
        ids, before = [9 if each.blank and at == 2 else x for at, x in enumerate(prompt)], prompt
        for _ in range(count):
            here = [edge for edge in each.cut if edge[1] < len(ids)]  # type: ignore[index]
            step = af.intervene(model, ids, cut=here, heads_off=each.heads_off)
            assert step.after.prediction is not None
            ids = [*ids, int(step.after.prediction.label)]
            plain = af.intervene(model, before).after.prediction
            assert plain is not None
            before = [*before, int(plain.label)]
        for outcome, expected in ((result.after, ids[6:]), (result.before, before[6:])):
            tokens = [int(token) for token in outcome.continuation]
            end = expected.index(3) + 1 if 3 in expected else count  # 3 ends a text
            assert tokens == expected[:end]
    assert found[0].after.continuation != found[0].before.continuation


# ---- errors --------------------------------------------------------------------------------------

ENCODED = af.Model(build("llama")).encode([5, 6, 7])
ERRORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "later key": ("llama", {"cut": [(2, 1, 3)]}, "layer 2 position 1 does not see position 3"),
    "window": ("mistral", {"cut": [(2, 6, 1)]}, "position 6 does not see position 1"),
    "layer": ("llama", {"cut": [(4, 1, 1)]}, "layer of an edge to cut must be from 1 to 3; got 4"),
    "query": ("llama", {"cut": [(1, 7, 1)]}, "must be from -7 to 6; got 7"),
    "head": ("llama", {"cut": [(1, 3, 1, 4)]}, "a head of layer 1 must be from 0 to 3; got 4"),
    "head off": ("llama", {"heads_off": [(1, 9)]}, "from 0 to 3; got 9"),
    "layer off": ("llama", {"heads_off": [(0, 1)]}, "from 1 to 3; got 0"),
    "cross": ("bart", {"cut": [(5, 7, 7)]}, "attends from positions 7..7 to positions 0..6"),
    "form": ("llama", {"cut": [(1, 2)]}, "an edge to cut is .layer, query, key."),
    "one edge": ("llama", {"cut": (1, 2, 1)}, "an edge to cut is"),
    "pair": ("llama", {"heads_off": (1, 2)}, "heads_off takes .layer, head. pairs; got 1"),
    "blank": ("llama", {"blank": [1.5]}, "blank must be whole numbers; got 1.5"),
    "span": (
        "llama",
        {"blank": [(3, 9)]},
        "a span is .start, end. within the 7 positions; got .3, 9.",
    ),
    "passage": ("llama", {"blank": "keys"}, "must stand in the text once; got 'keys'"),
    "reference": ("llama", {"reference": [[5, 6]]}, "reference is for heads"),
    "image": ("vit", {"blank": [1]}, "blank replaces tokens, and an image has none"),
    "headless": ("bert", {"target": 1}, "target and foil are for models that predict"),
    "another's": (
        "bert",
        {"heads_off": [(1, 0)], "reference": [ENCODED, af.load("verb-number").encode("the")]},
        "reference must be read by this model",
    ),
    "generate": ("bert", {"max_new_tokens": 3}, "max_new_tokens needs a causal LM"),
    "too long": ("llama", {"max_new_tokens": 50}, "at most 40 tokens; got a prompt of 7"),
    "no tokens": ("llama", {"max_new_tokens": 0}, "max_new_tokens must be a whole number"),
    "no blank": ("llama", {"max_new_tokens": 2, "blank": [1]}, "give replacement=, a token"),
    "later": ("llama", {"max_new_tokens": 2, "cut": [(1, 9, 1)]}, "must be from -7 to 6; got 9"),
    "nothing": ("llama", {"changes": []}, "at least one change must be given"),
    "kind": ("llama", {"changes": ["blank"]}, "changes must be a Change"),
    "both": ("llama", {"changes": af.Change(), "blank": 2}, "leave out blank, cut and heads_off"),
}


@pytest.mark.parametrize("name", list(ERRORS))
def test_bad_input_is_one_line(name: str) -> None:
    family, options, message = ERRORS[name]
    with pytest.raises(af.AttnFlowError, match=message) as error:
        af.intervene(make_model(family), make_input(family), **options)
    assert "\n" not in str(error.value)


def test_a_flow_of_another_input_or_model_is_refused() -> None:
    first = af.max_flow(af.capture("verb-number", SENTENCE), source=(6, 0), target=(0, 2))
    with pytest.raises(af.OptionError, match="must be of the same input; got one of 6 positions"):
        af.intervene("verb-number", "the keys to the old cabinet", cut=first)
    with pytest.raises(af.OptionError, match="must be of the same model"):
        af.intervene("verb-number-plain", SENTENCE, cut=first)
    with pytest.raises(af.OptionError, match="takes one input; got a list of 2"):
        af.intervene("verb-number", ["the keys", "the key"], blank=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", list(VISION))
def test_images_take_cuts_and_heads(family: str) -> None:
    model, value = make_model(family), make_input(family)
    result = af.intervene(model, value, cut=[(2, 0, 3)], heads_off=[(1, 1)])
    assert result.after.attention.grid == (3, 3)
    assert result.after.attention.weights[1, 0, 0, 3] == 0


# ---- pictures and pages --------------------------------------------------------------------------


def test_a_model_that_guesses_tokens_by_itself_is_refused_while_generating(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = af.Model(build("llama"))
    monkeypatch.setattr(model.model.generation_config, "prompt_lookup_num_tokens", 2)
    with pytest.raises(af.OptionError, match="has it guess tokens"):
        af.intervene(model, [5, 6, 7], heads_off=[(1, 0)], max_new_tokens=2)


def test_pictures_and_pages_show_both_rows(tmp_path: Path) -> None:
    result = af.intervene("verb-number", SENTENCE, blank="keys", cut=[(6, 0, 5)])
    before, after = result.by("rollout")
    drawn = af.figures.intervention(result)
    widths = {name: [bar.get_width() for bar in artists] for name, artists in drawn.artists.items()}
    shares = {  # without CLS
        name: row.values[0, 0, 1:] / row.values[0, 0, 1:].sum()
        for name, row in (("before", before), ("after", after))
    }
    assert widths["before"] == pytest.approx(shares["before"])
    assert widths["after"] == pytest.approx(shares["after"])
    first, second = drawn.axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_title().startswith("before: plural 0.98")
    assert "keys blanked, 1 edge cut" in second.get_title().replace("\n", " ")
    raw = af.figures.intervention(result, "raw", layer=2, exclude=None)
    assert len(raw.artists["after"]) == 6
    with pytest.raises(af.OptionError, match="draws what intervene returned; got str"):
        af.figures.intervention("keys")  # type: ignore[arg-type]
    for ending in (".png", ".svg", ".html", ".csv", ".json", ".md", ".tex"):
        assert result.save(tmp_path / f"result{ending}").stat().st_size > 300
    page = (tmp_path / "result.html").read_text()
    assert result.summary() in page
    strips = describe_intervention(result)
    assert strips.pairs is not None
    assert [pair.right for pair in strips.pairs][2] == "[UNK]"
    assert strips.pairs[0].values == (None, None)
    found = np.array([pair.values for pair in strips.pairs[1:]], dtype=float)
    assert pytest.approx(np.stack([shares["before"], shares["after"]])) == found.T
    assert strips.sides is not None
    assert [side.left_out for side in strips.sides] == pytest.approx(
        [before.values[0, 0, 0], after.values[0, 0, 0]]
    )
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["after"]["label"] == "singular"
    assert content["change"]["blanked"] == [2]
