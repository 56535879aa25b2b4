"""Sinks: found where they are planted or known, nowhere in even or diagonal attention, and by the stated rule everywhere."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from tests.families import build
from tests.oracles import Floats, any_attention, attention, real_attention

SIZES = [1, 2, 3, 4, 5, 8, 21, 100]


def even(size: int, causal: bool, window: int | None = None) -> Floats:
    """[query, key]: the same for every key that a query may see."""
    own = np.arange(size)
    seen = np.tril(np.ones((size, size))) if causal else np.ones((size, size))
    if window is not None:
        seen *= np.abs(own[:, None] - own) < window
    return np.asarray(seen / seen.sum(axis=1, keepdims=True))


def by_the_rule(graph: af.AttentionGraph) -> dict[int, float]:
    """{position: share} by plain loops over the stated rule, for graphs without windows."""
    shares: dict[int, list[float]] = {at: [] for at in range(graph.size)}
    large: dict[int, int] = dict.fromkeys(range(graph.size), 0)
    for weights in graph.weight_rows(range(1, graph.depth + 1), range(graph.size)):
        for key in range(graph.size):
            taken, enough = [], 0
            for query in range(graph.size):
                seen = query + 1 if graph.causal else graph.size
                if query == key or (graph.causal and key > query):
                    continue
                share = weights[query, key]
                taken.append(share)
                odds = np.inf if share >= 1 else share / (1 - share)
                enough += share >= 0.05 and odds * (seen - 1) >= 4 * (1 - 1e-12)
            readers = graph.size - 2 if graph.causal else graph.size - 1
            if len(taken) >= 3 and 2 * len(taken) >= readers:
                shares[key].append(float(np.mean(taken)))
                large[key] += enough >= 0.75 * len(taken)
    return {at: float(np.mean(shares[at])) for at in shares if 2 * large[at] > len(shares[at])}


@given(any_attention(max_layers=4, max_size=9))
def test_sinks_are_those_of_the_stated_rule(weights: Floats) -> None:
    graph = af.AttentionGraph(weights)
    found = af.sinks(graph)
    expected = by_the_rule(graph)
    assert {sink.position: pytest.approx(sink.share) for sink in found} == expected
    assert [sink.share for sink in found] == sorted((sink.share for sink in found), reverse=True)


@given(any_attention(max_layers=4, max_size=9), st.integers(0, 8))
def test_raw_attention_of_all_positions_shows_the_same_sinks(weights: Floats, without: int) -> None:
    removed = [without] if without < weights.shape[-1] > 1 else []
    graph = af.Attention(weights).graph(without=removed)
    found = {sink.position: sink.share for sink in af.sinks(af.raw(graph))}
    assert found == pytest.approx({sink.position: sink.share for sink in af.sinks(graph)})


def test_raw_attention_of_some_positions_shows_a_sink() -> None:
    weights = np.tile(0.4 * even(60, causal=True), (3, 1, 1))
    weights[:, :, 0] += 0.6
    rows = af.raw(weights, positions=[0, 19, 39, 59])
    assert [sink.position for sink in af.sinks(rows)] == [0]
    assert af.sinks(rows)[0].share == pytest.approx(weights[0, [19, 39, 59], 0].mean())
    with pytest.raises(af.OptionError, match="sinks require raw attention to single tokens"):
        af.sinks(af.rollout(weights))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 2, 5])
def test_even_and_diagonal_attention_have_none(size: int, causal: bool, window: int | None) -> None:
    for layer in (even(size, causal, window), np.eye(size), np.eye(size)[::-1]):
        hidden = (layer[np.triu_indices(size, 1)] > 0).any()
        asked: dict[str, Any] = {"causal": causal and not hidden}
        asked["window"] = None if layer[0, -1] and size > 1 else window
        layers = np.stack([layer] * 6)
        assert af.sinks(af.Attention(layers, **asked)) == ()
        # the same with the residual inside, large, and next to nothing
        for residual in (0.5, 1 - 1e-9):
            edges = (1 - residual) * layers + residual * np.eye(size)
            assert af.sinks(af.AttentionGraph(edges=edges, **asked)) == ()


@pytest.mark.parametrize("size", [12, 30, 300])
@pytest.mark.parametrize("causal", [False, True])
def test_planted_sinks_are_found_with_their_shares(size: int, causal: bool) -> None:
    """Every row gives 0.63 to the first position, and 0.3 to the second in all but two layers."""
    rng = np.random.default_rng(size)
    kind = "causal" if causal else "flat"
    rest = attention(kind, 7, size, rng)
    pull = np.zeros((7, size, size))
    pull[:, :, 0] = 0.7
    pull[:, :, 1] = 0.3
    pull[:2, :, :2] = [1.0, 0.0]
    if causal:
        pull[:, 0, :2] = [1.0, 0.0]
    found = af.sinks(0.9 * pull + 0.1 * rest)
    assert found[0].position == 0
    assert found[0].share == pytest.approx(0.71, abs=0.1)
    if size >= 100:
        assert [sink.position for sink in found] == [0, 1]


def test_a_local_pattern_and_a_late_or_rare_reading_are_no_sinks() -> None:
    size, depth = 40, 4
    local = np.tile(np.eye(size, k=-1), (depth, 1, 1))  # everyone looks at the one before
    local[:, 0, 0] = 1.0
    assert af.sinks(local) == ()
    late = np.stack([even(size, causal=True)] * depth)
    late[:, -5:, :] = np.eye(size)[-6]  # five rows at the end look at the one before them
    assert af.sinks(late) == ()
    rare = np.stack([even(size, causal=False)] * depth)
    rare[0] = np.eye(size)[3]  # everyone looks at position 3, in one layer of four
    assert af.sinks(rare) == ()


def test_the_first_tokens_of_real_models_are_found() -> None:
    """MiniLM's [CLS] and SmolLM2's first token, on 64 tokens.

    In its lowest 12 layers, which these are, SmolLM2 has a second sink, "the" within the text.
    """
    found = {name: af.sinks(weights) for name, weights in real_attention()}
    assert [sink.position for sink in found["minilm"]] == [0]
    assert [sink.position for sink in found["smollm2"]] == [0, 28]
    assert all(0.2 < sink.share < 0.4 for each in found.values() for sink in each)


def test_the_bundled_model_has_no_sinks() -> None:
    """Its attention is about the text: what it looks at most is what the answer depends on."""
    texts = ["the keys to the old cabinets in the hall", "books that the cat on the table likes"]
    texts += ["the author that the editors of the magazines like", "the only one of the boys"]
    assert [af.sinks(each) for each in af.capture(af.load(), texts)] == [()] * len(texts)


@given(any_attention(max_layers=3, max_size=8, kinds=["flat", "peaky", "causal"]))
def test_residual_inside_is_judged_by_what_other_positions_get(weights: Floats) -> None:
    """How much residual edges hold, and their scale, change nothing."""
    size = weights.shape[-1]
    found = []
    for residual, scale in ((0.1, 1.0), (0.9, 3.0)):
        edges = scale * ((1 - residual) * weights + residual * np.eye(size))
        found.append(af.sinks(af.AttentionGraph(edges=edges)))
    assert [sink.position for sink in found[0]] == [sink.position for sink in found[1]]
    for one, other in zip(*found, strict=True):
        assert one.share == pytest.approx(other.share)


def test_removed_positions_are_no_sinks_and_tokens_have_their_names() -> None:
    weights = np.stack([0.1 * even(9, False) + 0.9 * np.eye(9)[0]] * 3)
    found = af.Attention(weights, tokens=list("abcdefghi"))
    assert [(sink.position, sink.token) for sink in af.sinks(found)] == [(0, "a")]
    assert af.sinks(found.graph(without=[0])) == ()
    heads = af.Attention(np.stack([weights, weights], axis=1))  # [layer, head, query, key]
    assert [sink.position for sink in af.sinks(heads)] == [0]


def test_encoder_decoders_are_judged_by_the_positions_that_each_layer_touches() -> None:
    model = af.Model(build("t5"))
    captured = af.capture(model, [5, 6, 7, 8, 9, 3])
    assert captured.layer_names is not None
    assert af.sinks(captured) == ()  # random weights are nearly even
    encoder, decoder = 6, 5
    size = encoder + decoder
    layers = np.tile(np.eye(size), (4, 1, 1))
    layers[:2, :encoder, :encoder] = 0.05 * even(encoder, False) + 0.95 * np.eye(encoder)[5]
    layers[2, encoder:, encoder:] = even(decoder, True)
    layers[3, encoder:, :] = 0.0
    layers[3, encoder:, :encoder] = even(encoder, False)[0]
    names = ["encoder 1", "encoder 2", "decoder 1 self", "decoder 1 cross"]
    found = af.sinks(af.Attention(layers, layer_names=names))
    assert [sink.position for sink in found] == [5]
