"""Rows and segments without matrices equal the matrices' rollout, for every family with one stack."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers as t
from rich.console import Console

import attnflow as af
from attnflow.cli import commands as cli
from attnflow.rows.blocks import EdgeLayer
from attnflow.rows.products import RowBlock
from attnflow.show.terminal.folding import print_segments
from tests.families import DECODERS, ENCODERS, VISION, build, text, word_tokenizer

SAME = 1e-5
IDS = [7, 23, 41, 9, 55, 12, 30, 8, 17, 44, 5]
STACKS = [*ENCODERS, *DECODERS, *VISION]
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 3,
}
# what the families of capture's own tests do not have: narrow values, biases of scores
OTHERS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "deepseek-v3": (t.DeepseekV3ForCausalLM, text(t.DeepseekV3Config, **LATENT)),
    "mpt": (t.MptForCausalLM, text(t.MptConfig, d_model=32, n_heads=4, n_layers=3)),
    "t5 encoder": (
        t.T5EncoderModel,
        text(t.T5Config, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4),
    ),
}


def example(family: str) -> Any:
    if family in VISION:
        return torch.randn(3, 24, 24, generator=torch.Generator().manual_seed(3))
    return IDS


@cache
def other(family: str) -> Any:
    kind, configuration = OTHERS[family]
    torch.manual_seed(0)
    model = kind._from_config(configuration()).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data = torch.randn(parameter.shape) * 0.3
    return model


def check_rows(
    model: af.Model, given: Any, residual: float, without: list[int], normalize: str = "sum"
) -> None:
    """Rows of several layers, against the matrices."""
    asked: dict[str, Any] = {"layers": [3, 1, 2], "positions": [5, -1, 2]}
    graph = af.capture(model, given).graph(residual=residual, without=without)
    for expected, rows in (
        (
            af.rollout(graph, normalize=normalize, **asked),
            af.rollout_rows(
                model, given, residual=residual, without=without, normalize=normalize, **asked
            ),
        ),
        (af.raw(graph, **asked), af.raw_rows(model, given, without=without, **asked)),
    ):
        assert np.abs(rows.values - expected.values).max() < SAME
        for name in ("layers", "positions", "bottom", "tokens", "queries", "words", "causal"):
            assert getattr(rows, name) == getattr(expected, name), name
        for name in ("method", "normalize", "window", "removed", "size", "edges"):
            assert getattr(rows, name) == getattr(expected, name), name
        assert rows.source is not None
        assert expected.source is not None
        assert rows.source.fingerprint == expected.source.fingerprint


@pytest.mark.parametrize("implementation", [None, "eager"])
@pytest.mark.parametrize("family", STACKS)
def test_rows_equal_the_rollout_of_captured_attention(
    family: str, implementation: str | None
) -> None:
    model = af.Model(build(family, implementation))
    check_rows(model, example(family), 0.5, [])
    check_rows(model, example(family), 0.2, [0, 3])
    check_rows(model, example(family), 0.4, [3], "receptive_field")


@pytest.mark.parametrize("family", OTHERS)
def test_rows_of_latent_attention_and_of_biased_scores_equal_it_too(family: str) -> None:
    check_rows(af.Model(other(family)), IDS, 0.5, [])


def test_rows_do_not_depend_on_the_size_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"positions": range(len(IDS)), "layers": [1, 2, 3]}
    for family in ("gemma2", "gpt-oss", "llama", "modernbert", "bloom"):
        model = af.Model(build(family))
        whole = af.rollout_rows(model, IDS, **asked).values
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["attnflow.models.attention_weights"], "BLOCK_SCORES", 100)
            patch.setattr(sys.modules["attnflow.rows.products"], "BLOCK_SCORES", 100)
            patch.setattr(sys.modules["attnflow.rows.products"], "BLOCK_QUERIES", 2)
            pieces = af.rollout_rows(model, IDS, **asked).values
        assert np.abs(whole - pieces).max() < 1e-6


def test_many_rows_weigh_every_query_of_a_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = af.Model(build("llama"))
    ids = torch.randint(0, 60, (36,), generator=torch.Generator().manual_seed(3)).tolist()
    weighed: Counter[tuple[int, int]] = Counter()  # times, by layer and query
    plain = EdgeLayer.weigh

    def count(self: EdgeLayer, queries: torch.Tensor, *given: torch.Tensor) -> RowBlock:
        weighed.update((id(self), query) for query in queries.tolist())
        return plain(self, queries, *given)

    monkeypatch.setattr(EdgeLayer, "weigh", count)
    rows = af.rollout_rows(model, ids, positions=range(36), layers=[3, 1], edges="contribution")
    assert set(weighed.values()) == {1}
    assert len(weighed) == 3 * 36
    one = af.rollout_rows(model, ids, positions=[30], layers=[3, 1], edges="contribution")
    assert np.abs(rows.values[:, [30]] - one.values).max() < 1e-6


OWN = af.edge_weight("squares", lambda mix: mix.attention.pow(2), residual="mixed")


@pytest.mark.parametrize("edges", ["norm", "contribution", "effective", OWN])
@pytest.mark.parametrize("family", STACKS)
def test_rows_on_edges_equal_the_rollout_of_their_graph(
    family: str, edges: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = af.Model(build(family)), example(family)
    if not model.probe.interface:
        with pytest.raises(af.CaptureError, match="attends outside of transformers' attention"):
            af.rollout_rows(model, given, edges=edges, positions=[-1])
        return
    graph = af.attention_graph(model, given, edges=edges)
    asked: dict[str, Any] = {"layers": [3, 1, 2], "positions": [5, -1, 2]}
    for scores in (2**24, 100):  # all queries in one block, and one query in each
        monkeypatch.setattr(sys.modules["attnflow.rows.blocks"], "BLOCK_WEIGHTS", scores)
        for expected, rows in (
            (af.rollout(graph, **asked), af.rollout_rows(model, given, edges=edges, **asked)),
            (af.raw(graph, **asked), af.raw_rows(model, given, edges=edges, **asked)),
        ):
            assert np.abs(rows.values - expected.values).max() < SAME
            for name in ("layers", "positions", "bottom", "tokens", "queries", "edges", "method"):
                assert getattr(rows, name) == getattr(expected, name), name
            assert rows.source is not None
            assert expected.source is not None
            assert rows.source.edges == expected.source.edges
            assert rows.lost is None


@pytest.mark.parametrize("edges", ["attention", "contribution"])
def test_what_is_skipped_is_counted_and_bounds_the_difference(edges: str) -> None:
    model = af.Model(build("llama"))
    ids = torch.randint(0, 60, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    asked: dict[str, Any] = {"edges": edges, "positions": [-1, 20], "layers": [1, 2, 3]}
    whole = af.rollout_rows(model, ids, **asked)
    before = 0.0
    for skip in (0.01, 0.1, 0.5):
        rows = af.rollout_rows(model, ids, skip=skip, **asked)
        assert rows.lost is not None
        assert rows.lost.shape == (3, 2)
        assert rows.lost.max() <= skip
        assert rows.lost.max() >= before
        before = float(rows.lost.max())
        apart = np.abs(rows.values - whole.values).sum(axis=-1)
        assert (apart <= 2 * rows.lost / (1 - rows.lost) + 1e-5).all()
        assert np.abs(rows.values.sum(axis=-1) - 1).max() < 1e-12
        assert rows.select(20, 3).lost is not None
    assert before > 0


BAD_EDGES: list[tuple[dict[str, Any], str]] = [
    (
        {"edges": "gradient"},
        "rows are not available on edges 'gradient': .* use 'attention', 'norm'",
    ),
    ({"edges": "value_zeroing"}, "rows are not available on edges 'value_zeroing': they need each"),
    ({"edges": ["norm", "attention"]}, "rows are on one kind of edges; got norm, attention"),
    ({"edges": "norms"}, "unknown edges 'norms'; choose from attention"),
    ({"edges": "norm", "without": [0]}, r"are of attention; got edges 'norm' and without=\[0\]"),
]


@pytest.mark.parametrize(("options", "message"), BAD_EDGES)
def test_edges_that_rows_cannot_have_get_one_clear_line(
    options: dict[str, Any], message: str
) -> None:
    for function in (af.rollout_rows, af.raw_rows):
        with pytest.raises(af.OptionError, match=message) as error:
            function(build("llama"), IDS, positions=[-1], **options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"residual": 0.5}, "hold the residual inside"),
        ({"normalize": "receptive_field"}, "got edges 'norm' and normalize='receptive_field'"),
        ({"skip": 1.0}, "skip must be a number from 0 up to but not including 1; got 1.0"),
        ({"skip": "little"}, "skip must be a number from 0"),
    ],
)
def test_options_that_edges_cannot_have_get_one_clear_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(af.OptionError, match=message):
        af.rollout_rows(build("llama"), IDS, positions=[-1], edges="norm", **options)


def test_the_top_layer_is_the_default_and_several_inputs_give_a_list() -> None:
    model = build("llama")
    rows = af.rollout_rows(model, IDS, positions=[-1])
    assert (rows.layers, rows.positions, rows.values.shape) == ((3,), (10,), (1, 1, 11))
    assert af.raw_rows(model, IDS, positions=-1).layers == (3,)
    inputs = [IDS, IDS[:4], [9]]
    for function in (af.rollout_rows, af.raw_rows):
        together = function(model, inputs, positions=[-1])
        assert [each.values.shape[-1] for each in together] == [11, 4, 1]
        for each, given in zip(together, inputs, strict=True):
            alone = function(model, given, positions=[-1])
            assert isinstance(alone, af.TokenAttention)
            assert np.array_equal(each.values, alone.values)


@pytest.mark.parametrize("edges", ["attention", "norm", "contribution"])
def test_no_matrix_is_ever_in_memory(edges: str) -> None:
    """The largest tensor that is made while rows travel, 600 positions long, is no 600 x 600."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            output = func(*args, **(kwargs or {}))
            for each in output if isinstance(output, tuple | list) else [output]:
                if isinstance(each, torch.Tensor):
                    self.largest = max(self.largest, each.numel())
            return output

    torch.manual_seed(0)
    config = text(t.LlamaConfig, max_position_embeddings=1000, num_key_value_heads=2)()
    model = af.Model(t.LlamaForCausalLM._from_config(config).eval())
    ids = torch.randint(0, 60, (600,)).tolist()
    asked: dict[str, Any] = {"positions": range(-8, 0), "edges": edges}
    af.rollout_rows(model, ids[:4], positions=[-1], edges=edges)  # so that it has been traced
    with pytest.MonkeyPatch.context() as patch, Watch() as watch:
        patch.setattr(sys.modules["attnflow.rows.products"], "BLOCK_SCORES", 10_000)
        patch.setattr(sys.modules["attnflow.rows.products"], "BLOCK_QUERIES", 5)
        patch.setattr(sys.modules["attnflow.rows.blocks"], "BLOCK_WEIGHTS", 10_000)
        rows = af.rollout_rows(model, ids, **asked)
    # the vectors of all heads, which are linear in the length, are [4, 600, 32]
    assert 0 < watch.largest <= max(600 * 600 / 5, 4 * 600 * 32)
    graph = af.attention_graph(model, ids, edges=edges)
    expected = af.rollout(graph, layers=[3], positions=range(-8, 0))
    assert np.abs(rows.values - expected.values).max() < SAME


def test_half_precision_and_training_mode_are_no_obstacle() -> None:
    model = build.__wrapped__("llama").to(torch.bfloat16).train()  # one of its own
    expected = af.rollout(af.capture(model, IDS), layers=[3], positions=[-1])
    rows = af.rollout_rows(model, IDS, positions=[-1])
    assert np.abs(rows.values - expected.values).max() < SAME
    assert model.training


def test_a_mask_that_went_missing_is_an_error() -> None:
    model = build.__wrapped__("qwen3")  # one of its own, so that nothing is remembered of it
    attentions = [module for module in model.modules() if getattr(module, "is_causal", False)]
    for module in attentions:
        module.is_causal = False
    with pytest.raises(af.CaptureError, match=r"must hide later positions; got .* at layer 1"):
        af.rollout_rows(model, IDS, positions=[-1])


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (IDS, {"positions": [11]}, "positions must be from -11 to 10; got 11"),
    (IDS, {"positions": []}, "at least one position must be asked for; got none"),
    (IDS, {"positions": None}, "got positions=None: give some"),
    (IDS, {"positions": [0] * 12}, "at most 11 rows can be asked for, one per position; got 12"),
    (IDS, {"positions": ["a"]}, "positions must be whole numbers; got 'a'"),
    (IDS, {"positions": [0], "layers": [4]}, "layers must be from 1 to 3; got 4"),
    (IDS, {"positions": [0], "layers": [0]}, "layers must be from 1 to 3; got 0"),
    (IDS, {"positions": [0], "layers": []}, "at least one layer must be asked for; got none"),
    (IDS, {"positions": [0], "without": [0]}, "position 0 was taken out"),
    (IDS, {"positions": [0], "without": range(11)}, "must leave at least one position"),
    ("a text", {"positions": [0]}, "has no tokenizer"),
    ([{"role": "user", "content": "hello"}], {"positions": [0]}, "with a chat template"),
]


@pytest.mark.parametrize(("given", "options", "message"), BAD)
def test_bad_rows_get_one_clear_line(given: Any, options: dict[str, Any], message: str) -> None:
    for function in (af.rollout_rows, af.raw_rows):
        with pytest.raises(af.OptionError, match=message) as error:
            function(build("llama"), given, **options)
        assert "\n" not in str(error.value)


def test_a_bad_residual_and_an_encoder_decoder_get_one_clear_line() -> None:
    with pytest.raises(af.OptionError, match="residual must be a number from 0"):
        af.rollout_rows(build("llama"), IDS, positions=[0], residual=1.0)
    with pytest.raises(af.OptionError, match="unknown normalize 'max'; choose from sum"):
        af.rollout_rows(build("llama"), IDS, positions=[0], normalize="max")
    with pytest.raises(af.OptionError, match="T5ForConditionalGeneration is an encoder-decoder"):
        af.rollout_rows(build("t5"), IDS, positions=[0])


# ---- segments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", STACKS)
def test_segments_equal_the_rollout_to_groups(family: str) -> None:
    model = af.Model(build(family))
    segments = {"first": (1, 4), "second": af.Group("second", (6, 8))}
    for normalize, residual, without in (
        ("sum", 0.5, []),
        ("sum", 0.3, [2]),
        ("receptive_field", 0.5, [2]),
    ):
        graph = af.capture(model, example(family)).graph(residual=residual, without=without)
        shares = af.rollout_segments(
            model,
            example(family),
            segments=segments,
            residual=residual,
            without=without,
            normalize=normalize,
        )
        first = [place for place in (1, 2, 3) if place not in without]
        rest = [0, 4, 5, 7, *range(9, graph.size)]
        groups = {"first": first, "second": [6, 8], "(rest)": rest}
        expected = af.rollout(graph, groups=groups, normalize=normalize)
        assert np.abs(shares.values - expected.values).max() < SAME
        assert np.abs(shares.values.sum(axis=-1) - 1).max() < 1e-12
        for name in ("layers", "positions", "tokens", "queries", "groups", "causal", "window"):
            assert getattr(shares, name) == getattr(expected, name), name


def test_more_segments_than_one_pass_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    model = af.Model(build("llama"))
    segments = [(place, place + 1) for place in range(len(IDS))]
    monkeypatch.setattr(sys.modules["attnflow.rows.segments"], "COLUMNS", 4)
    asked: dict[str, Any] = {"layers": [2, 3], "positions": [-1, 4]}
    for edges in ("attention", "contribution"):
        shares = af.rollout_segments(model, IDS, segments=segments, edges=edges, **asked)
        expected = af.rollout(af.attention_graph(model, IDS, edges=edges), **asked)
        # nothing is left: no more column
        assert np.abs(shares.values - expected.values).max() < SAME
        assert shares.layers == (2, 3)
        rows = af.rollout_rows(model, IDS, edges=edges, **asked)
        assert np.abs(shares.values - rows.values).max() < 1e-6


@pytest.mark.parametrize("edges", ["contribution", OWN])
@pytest.mark.parametrize("family", STACKS)
def test_segments_on_edges_equal_the_rollout_of_their_graph(family: str, edges: Any) -> None:
    model, given = af.Model(build(family)), example(family)
    if not model.probe.interface:
        with pytest.raises(af.CaptureError, match="attends outside of transformers' attention"):
            af.rollout_segments(model, given, segments=[(0, 3)], edges=edges)
        return
    size = len(model.encode(given).tokens)
    segments = {"first": (1, 4), "second": af.Group("second", (6, 8))}
    groups = {"first": [1, 2, 3], "second": [6, 8], "(rest)": [0, 4, 5, 7, *range(9, size)]}
    graph = af.attention_graph(model, given, edges=edges)
    several: tuple[dict[str, Any], ...] = (
        {"layers": [3, 1], "positions": [5, -1, 2]},
        {"layers": [2], "positions": [8]},
    )
    for asked in several:
        shares = af.rollout_segments(model, given, segments=segments, edges=edges, **asked)
        expected = af.rollout(graph, groups=groups, **asked)
        assert np.abs(shares.values - expected.values).max() < SAME
        for name in ("layers", "positions", "tokens", "queries", "groups", "causal", "edges"):
            assert getattr(shares, name) == getattr(expected, name), name
    default = af.rollout_segments(model, given, segments=segments, edges=edges)
    assert default.layers == (3,)
    assert default.positions == ((size - 1,) if model.is_causal else tuple(range(size)))


def test_segments_of_a_causal_model_follow_contributions_and_say_so() -> None:
    model = af.Model(build("llama"))
    with pytest.warns(FutureWarning, match="edges='attention' gives the shares of 0.3"):
        shares = af.rollout_segments(model, IDS, segments=[(0, 3)])
    named = af.rollout_segments(model, IDS, segments=[(0, 3)], edges="contribution")
    assert shares.edges == "contribution"
    assert shares.source is not None
    assert (shares.source.edges, shares.source.residual) == ("contribution", None)
    assert (shares.layers, shares.positions) == ((3,), (10,))
    assert (shares.values == named.values).all()
    before = af.rollout_segments(model, IDS, segments=[(0, 3)], edges="attention")
    assert (before.edges, before.values.shape) == ("attention", (3, 11, 2))
    options: tuple[dict[str, Any], ...] = (
        {"residual": 0.5},
        {"without": [5]},
        {"normalize": "receptive_field"},
    )
    for given in options:  # of the attention graph, so it is meant
        assert af.rollout_segments(model, IDS, segments=[(0, 3)], **given).edges == "attention"
    with pytest.warns(UserWarning, match="followed attention, not contributions: .* outside of"):
        bloom = af.rollout_segments(af.Model(build("bloom")), IDS, segments=[(0, 3)])
    assert bloom.edges == "attention"
    bert = af.rollout_segments(build("bert"), IDS, segments=[(0, 3)])
    assert (bert.edges, bert.values.shape) == ("attention", (3, 11, 2))
    for edges, message in (
        ("gradient", "rows are not available on edges 'gradient'"),
        (["norm", "attention"], "rows are on one kind of edges"),
        ("sums", "unknown edges 'sums'"),
    ):
        with pytest.raises(af.OptionError, match=message):
            af.rollout_segments(model, IDS, segments=[(0, 3)], edges=edges)
    bad: tuple[tuple[dict[str, Any], str], ...] = (
        ({"residual": 0.2}, "hold the residual inside"),
        ({"without": [0]}, "are of attention; got edges 'contribution' and without"),
    )
    for given, message in bad:
        with pytest.raises(af.OptionError, match=message):
            af.rollout_segments(model, IDS, segments=[(0, 3)], edges="contribution", **given)


WORDS = "the key is lost. here the cabinets are lost? Here is the key"


@pytest.fixture(scope="module")
def reader() -> af.Model:
    """A model with a tokenizer of words and a template of chats."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[MASK] {{ m['role'] }} {{ m['content'] | trim }} [SEP]{% endfor %}"
    )
    return af.Model(build("bert"), tokenizer)


def spell(shares: af.TokenAttention, tokens: tuple[str, ...]) -> list[list[str]]:
    """The tokens of each segment."""
    assert shares.groups is not None
    return [[tokens[place] for place in group.positions] for group in shares.groups]


def test_sentences_lines_and_words_are_segments(reader: af.Model) -> None:
    tokens = reader.encode(WORDS).tokens
    shares = af.rollout_segments(reader, WORDS, segments="sentences")
    assert shares.tokens == (
        "the key is lost. here the cabinets are lost?",  # a small letter starts no sentence
        "Here is the key",
        "(rest)",
    )
    assert spell(shares, tokens)[2] == ["[CLS]", "[SEP]"]
    lines = "the key\n\n  is lost\nhere"
    shares = af.rollout_segments(reader, lines, segments="lines")
    assert shares.tokens == ("the key", "is lost", "here", "(rest)")
    assert spell(shares, reader.encode(lines).tokens)[:2] == [["the", "key"], ["is", "lost"]]
    shares = af.rollout_segments(reader, "the key the key", segments="words")
    assert shares.tokens == ("the", "key", "the", "key", "(rest)")
    several = af.rollout_segments(reader, [WORDS, lines], segments="lines", positions=[0])
    assert [len(each.tokens) for each in several] == [2, 4]
    both = af.rollout_segments(reader, ["the key", lines], segments=[{"a": (0, 1)}, "lines"])
    assert both[0].tokens == ("a", "(rest)")


def test_spans_of_characters_and_passages_find_their_tokens(reader: af.Model) -> None:
    tokens = reader.encode(WORDS).tokens
    start = WORDS.index("cabinets")
    shares = af.rollout_segments(
        reader, WORDS, segments={"what": (start, start + 8), "end": (-3, None)}, unit="characters"
    )
    assert spell(shares, tokens)[:2] == [["cabinets"], ["key"]]
    passages = af.rollout_segments(reader, WORDS, segments={"what": "the cabinets", "b": "is lost"})
    assert spell(passages, tokens)[:2] == [["the", "cabinets"], ["is", "lost"]]
    counted = af.rollout_segments(reader, WORDS, segments={"end": (-3, None)})
    assert spell(counted, tokens)[0] == ["the", "key", "[SEP]"]


def test_turns_of_a_chat_are_segments(reader: af.Model) -> None:
    chat = [
        {"role": "system", "content": " the key "},
        {"role": "user", "content": "is lost here"},
        {"role": "assistant", "content": "the key"},
    ]
    shares = af.rollout_segments(reader, chat, segments="turns", positions=[0])
    assert shares.tokens == ("1 system", "2 user", "3 assistant", "(rest)")
    assert shares.groups is not None
    assert [len(group.positions) for group in shares.groups] == [2, 3, 2, 8]
    rows = af.rollout_rows(reader, chat, positions=[0])
    assert rows.tokens[:4] == ("[MASK]", "[UNK]", "the", "key")
    assert np.abs(rows.by_word().values.sum() - 1) < 1e-6
    totals = [rows.values[0, 0, list(group.positions)].sum() for group in shares.groups]
    assert np.abs(shares.at(0) - totals).max() < 1e-6


BAD_SEGMENTS: list[tuple[Any, dict[str, Any], str]] = [
    (WORDS, {"segments": {"a": (0, 4), "b": (3, 6)}}, "position 3 in 'a' and in 'b'"),
    (WORDS, {"segments": {"a": (0, 40)}}, r"'a' must lie within the 17 positions; got \(0, 40\)"),
    (WORDS, {"segments": {"a": (-18, 3)}}, "'a' must lie within the 17 positions"),
    (WORDS, {"segments": {"a": (4, 4)}}, r"'a' must end after it starts; got \(4, 4\)"),
    (WORDS, {"segments": {"a": (4, 3)}}, "'a' must end after it starts"),
    (
        WORDS,
        {"segments": {"a": (0.5, 3)}},
        "the span of segment 'a' must be whole numbers; got 0.5",
    ),
    (WORDS, {"segments": {"a": 3}}, r"'a' must be a span \(start, end\) of positions"),
    (WORDS, {"segments": {5: (0, 1)}}, "the names of segments must be strings; got 5"),
    (WORDS, {"segments": {}}, "at least one segment must be given; got none"),
    (WORDS, {"segments": 5}, "segments must be one of sentences, lines, words, turns"),
    (WORDS, {"segments": "pages"}, "unknown segments 'pages'; choose from sentences, lines"),
    (WORDS, {"segments": {"a": "nobody"}}, "'nobody', which stands there 0 times"),
    (WORDS, {"segments": {"a": "the key"}}, "'the key', which stands there 2 times"),
    (WORDS, {"segments": {"a": ""}}, "stands there 0 times"),
    (WORDS, {"segments": {"a": (3, 4)}, "unit": "characters"}, "must hold at least one token"),
    (WORDS, {"segments": {"a": (0, 99)}, "unit": "characters"}, "within the 60 characters"),
    (WORDS, {"segments": "lines", "unit": "bytes"}, "unknown unit 'bytes'; choose from positions"),
    (WORDS, {"segments": "turns"}, "needs the messages of a chat"),
    (WORDS, {"segments": {"a": af.Group("a", (50,))}}, "within the 17 positions; got 50"),
    (WORDS, {"segments": {"a": (0, 1)}, "without": [0]}, "'a' has no position left"),
    (IDS, {"segments": "sentences"}, "need a text and a fast tokenizer"),
    (IDS, {"segments": "words"}, "needs a text and a fast tokenizer"),
    ([WORDS, WORDS], {"segments": {"a": (0, 1)}}, "a list of 2; got dict"),
    ([{"role": "user", "content": 5}], {"segments": "turns"}, "a role and a content, both texts"),
]


@pytest.mark.parametrize(("given", "options", "message"), BAD_SEGMENTS)
def test_bad_segments_get_one_clear_line(
    given: Any, options: dict[str, Any], message: str, reader: af.Model
) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        af.rollout_segments(reader, given, **options)
    assert "\n" not in str(error.value)


def test_shares_that_memory_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["attnflow.rows.segments"], "find_available_memory", lambda: 1000
    )
    with pytest.raises(af.OptionError, match=r"give one position, or fewer layers"):
        af.rollout_segments(build("llama"), IDS, segments=[(0, 3)], edges="attention")
    af.rollout_segments(build("llama"), IDS, segments=[(0, 3)], edges="contribution")


def test_a_capture_beyond_memory_names_what_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_calls = sys.modules["attnflow.models.attention_calls"]
    monkeypatch.setattr(attention_calls, "LITTLE_MEMORY", 0)
    monkeypatch.setattr(attention_calls, "find_available_memory", lambda: 1000)
    with pytest.raises(MemoryError, match=r"11 positions in 3 layers takes .*; rollout_rows and"):
        af.capture(build("llama"), IDS)
    af.rollout_rows(build("llama"), IDS, positions=[-1])


# ---- explanations and generations ---------------------------------------------------------------

LONG = "the key is lost. Here the cabinets are lost? Here is the key to the cabinets"
CHAT = [
    {"role": "user", "content": "the key is lost"},
    {"role": "assistant", "content": "is the key here"},
]


@pytest.fixture(scope="module")
def writer() -> af.Model:
    """A decoder with a tokenizer of words and a template of chats."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[MASK] {{ m['role'] }} {{ m['content'] | trim }} [SEP]{% endfor %}"
    )
    return af.Model(build("llama"), tokenizer)


EVERYTHING: dict[str, Any] = {"edges": ["contribution", "attention"], "importance": ()}


def test_a_long_input_is_explained_by_rows(
    writer: af.Model, request: pytest.FixtureRequest
) -> None:
    whole = af.explain(LONG, model=writer, methods=["raw", "rollout"], **EVERYTHING)
    assert whole.graph is not None
    request.getfixturevalue("short_graphs")
    found = af.explain(LONG, model=writer)
    assert list(found.results) == ["contribution rollout", "raw", "rollout"]
    assert found.first == "contribution rollout"
    expected = whole.results[found.first].values[:, found.position]
    assert np.abs(found.results[found.first].values[:, 0] - expected).max() < 2e-3
    assert not found.summary().startswith("These are rows of attention")
    assert any(note.startswith("contribution rows weigh each pair of") for note in found.notes)
    found = af.explain(LONG, model=writer, methods=["raw", "rollout"])
    assert list(found.results) == ["raw", "rollout"]
    assert found.summary().startswith("These are rows of attention alone, not of contributions.")
    assert found.witnesses is not None
    assert whole.captured is not None
    witnessed = af.raw(whole.captured, positions=found.witnesses.positions)
    np.testing.assert_allclose(found.witnesses.values, witnessed.values, atol=1e-6)
    assert found.sinks == af.sinks(found.witnesses)
    assert found.first == "rollout"
    assert any("rows are of attention alone; with edges=" in note for note in found.notes)
    found = af.explain(LONG, model=writer, edges=["contribution", "attention"])
    assert found.graph is None
    assert found.graphs == {}
    assert list(found.results) == [
        "contribution raw",
        "contribution rollout",
        "raw",
        "rollout",
    ]
    assert found.first == "contribution raw"
    assert found.depth == 3
    assert found.prediction is not None
    assert whole.prediction is not None
    assert found.prediction[0] == whole.prediction[0]
    assert abs(found.prediction[1] - whole.prediction[1]) < 1e-5
    for name, result in found.results.items():
        assert (result.positions, result.layers) == ((found.position,), (1, 2, 3))
        apart = np.abs(result.values[:, 0] - whole.results[name].values[:, found.position])
        lost = 0.0 if result.lost is None else result.lost.max()
        assert lost <= 1e-3
        assert apart.max() < SAME + 2 * lost
    assert any(
        note.startswith("flow is left out: it needs the whole graph") for note in found.notes
    )
    assert any("importance is left out above 8 tokens" in note for note in found.notes)
    assert [group.name for group in found.segments] == [
        "the key is lost.",
        "Here the cabinets are lost?",
        "Here is the key to the cabinets",
        "(rest)",
    ]
    folded = found.row("rollout", by_segment=True)
    for share, group in zip(folded.at(found.position), found.segments, strict=True):
        assert abs(share - found.rollout.at(found.position)[list(group.positions)].sum()) < 1e-12
    assert found.row("rollout", by_word=True).at(found.position).sum() == pytest.approx(1)
    assert found.sinks == ()
    assert "read mostly" in found.summary()
    with pytest.raises(af.OptionError, match="no weights of heads"):
        _ = found.attention


def test_what_a_long_input_is_asked_for_by_name_still_comes(
    writer: af.Model, short_graphs: None
) -> None:
    assert af.explain(LONG, model=writer, methods=["flow"], importance=()).graph is not None
    assert "blank_out" in af.explain(LONG, model=writer, importance=["blank_out"]).importance
    assert af.explain(LONG, model=writer, edges="gradient", methods=["rollout"]).graph is not None
    assert af.explain(LONG, model=writer, heads=None).graph is not None
    rows = af.explain(LONG, model=writer, methods=["rollout"], without=[0])
    assert list(rows.results) == ["rollout"]
    assert rows.rollout.removed == (0,)
    assert rows.residual == 0.5
    field = af.explain(LONG, model=writer, normalize="receptive_field")
    assert list(field.results) == ["raw", "rollout"]
    for result in field.results.values():
        assert result.normalize == "receptive_field"
    with pytest.raises(af.OptionError, match="do not add up over the tokens of a segment"):
        field.row("rollout", by_segment=True)


def test_a_long_input_of_any_model_is_explained(short_graphs: None) -> None:
    for family in ("bloom", "bert", "modernbert", "gpt-oss"):
        options: dict[str, Any] = {"position": -1} if family == "modernbert" else {}
        found = af.explain([*IDS], model=build(family), **options)
        rows = ["contribution rollout", "raw", "rollout"]
        assert list(found.results) == (rows[1:] if family == "bloom" else rows)
        alone = found.summary().startswith("These are rows of attention alone")
        missing = [note for note in found.notes if "are not available for this model" in note]
        assert (alone, len(missing)) == ((True, 1) if family == "bloom" else (False, 0))
        assert (found.prediction is None) == (family == "bert")
        assert found.segments == ()
    story = af.generate(build("bloom"), IDS, max_new_tokens=2, eos_token_id=None)
    assert story.rollout().values.shape == (2, 11, 3)


def test_contributions_that_memory_cannot_hold_are_left_out_in_the_first_sentence(
    writer: af.Model, short_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_inputs = sys.modules["attnflow.analysis.long_inputs"]
    monkeypatch.setattr(long_inputs, "find_available_memory", lambda: 1000)
    found = af.explain(LONG, model=writer)
    assert list(found.results) == ["raw", "rollout"]
    assert found.summary().startswith("These are rows of attention alone, not of contributions.")
    assert any("contribution edges would keep" in note for note in found.notes)
    named = af.explain(LONG, model=writer, edges="contribution")
    assert list(named.results) == ["contribution raw", "contribution rollout"]


def test_a_long_explanation_is_shown_and_saved(
    writer: af.Model,
    short_graphs: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rich.console import Console

    from attnflow.show.terminal.answers import print_explanation

    found = af.explain(LONG, model=writer)
    print_explanation(Console(width=140), found)
    shown = capsys.readouterr().out
    assert "Here the cabinets are lost?" in shown
    assert shown.count("█") + shown.count("#") > 10
    for ending in (".html", ".json", ".csv", ".npz", ".md"):
        assert found.save(tmp_path / f"long{ending}").stat().st_size > 100
    content = json.loads((tmp_path / "long.json").read_text())
    assert content["segments"][0] == ["the key is lost.", [1, 2, 3, 4, 5]]
    with pytest.raises(af.OptionError, match="a picture has no room for 20 tokens; save a page"):
        found.save(tmp_path / "long.png")


def test_a_chat_is_explained_with_a_bar_per_turn(
    writer: af.Model, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    from rich.console import Console

    from attnflow.show.terminal.answers import print_explanation

    for _ in ("short", "long"):
        found = af.explain(CHAT, model=writer)
        assert [group.name for group in found.segments] == ["1 user", "2 assistant", "(rest)"]
        assert found.texts[0].startswith("[MASK] user the key is lost")
        print_explanation(Console(width=140), found)
        assert "2 assistant" in capsys.readouterr().out
        shares = af.rollout_segments(
            writer, CHAT, segments="turns", edges="attention", positions=[-1]
        )
        folded = found.row("rollout", by_segment=True)
        assert np.abs(folded.at(found.position) - shares.at(-1)).max() < SAME
        request.getfixturevalue("short_graphs")


def test_after_a_long_prompt_rows_of_generated_tokens_are_read(
    writer: af.Model,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": None}
    whole = af.generate(writer, LONG, **options)
    request.getfixturevalue("short_graphs")
    assert af.generate(writer, LONG, **options).edges == ("attention",)
    kinds = ["contribution", "attention"]
    story, brief = af.generate(writer, [LONG, "the key"], edges=kinds, **options)
    assert brief.captured is not None
    assert story.captured is None
    assert (story.tokens, story.prompt) == (whole.tokens, whole.prompt)
    assert np.allclose(story.probabilities, whole.probabilities, atol=1e-5)
    assert story.positions == whole.positions
    assert story.edges == ("contribution", "attention")
    for method in ("raw", "rollout"):
        for normalize in (None, "sum", "receptive_field"):
            expected = whole.by(method, normalize=normalize)
            found = story.by(method, normalize=normalize)
            assert np.abs(found.values - expected.values).max() < SAME
        expected, found = (each.by(method, edges="contribution") for each in (whole, story))
        assert np.abs(found.values - expected.values).max() < 2e-3
        assert (found.method, found.layers) == (expected.method, expected.layers)
    assert (
        np.abs(story.rollout(without=[0]).values - whole.rollout(without=[0]).values).max() < SAME
    )
    assert story.save(tmp_path / "story.html").stat().st_size > 1000
    assert story.sinks == ()
    assert "read mostly" in story.summary().lower()
    for ask, message in (
        (lambda: story.flow(), "only raw and rollout are available"),
        (lambda: story.attention, "attention is not kept"),
        (lambda: story.rollout(edges="norm"), "it has contribution, attention"),
        (lambda: story.rollout(edges="contribution", residual=0.5), "make a graph of attention"),
    ):
        with pytest.raises(af.OptionError, match=message):
            ask()


@pytest.mark.parametrize("family", [*DECODERS, "deepseek-v3", "mpt"])
def test_rows_after_a_long_prompt_come_from_the_cache_or_from_one_more_pass(
    family: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = other(family) if family in OTHERS else build(family)
    options: dict[str, Any] = {"max_new_tokens": 4, "eos_token_id": None, "edges": "attention"}
    whole = af.generate(model, IDS, **options)
    request.getfixturevalue("short_graphs")
    story = af.generate(model, IDS, **options)
    assert (story.captured, story.tokens) == (None, whole.tokens)
    runs = []
    rows = sys.modules["attnflow.rows.rows"]
    original = rows.run_layers

    def count(*given: Any, **more: Any) -> Any:
        runs.append(given)
        return original(*given, **more)

    monkeypatch.setattr(rows, "run_layers", count)
    for method in ("raw", "rollout"):
        found, expected = story.by(method), whole.by(method)
        assert np.abs(found.values - expected.values).max() < SAME
    # windows and score biases hide more than the future, or are no queries and keys
    from_cache = family in ("gpt2", "gpt-neox", "opt", "llama", "qwen3", "phi3", "deepseek-v3")
    assert len(runs) == (0 if from_cache else 2)


@pytest.mark.parametrize("edges", ["attention", "norm"])
def test_a_graph_beyond_memory_names_what_needs_none(
    edges: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention_calls = sys.modules["attnflow.models.attention_calls"]
    monkeypatch.setattr(attention_calls, "LITTLE_MEMORY", 0)
    monkeypatch.setattr(attention_calls, "find_available_memory", lambda: 1000)
    for ask in (
        lambda: af.attention_graph(build("llama"), IDS, edges=edges),
        lambda: af.explain(IDS, model=build("llama"), edges=edges),
        lambda: af.generate(build("llama"), IDS, edges=edges, max_new_tokens=2),
    ):
        with pytest.raises(MemoryError, match="rollout_rows and rollout_segments build no such"):
            ask()
    af.rollout_rows(build("llama"), IDS, positions=[-1], edges=edges)


# ---- a corpus of segments -----------------------------------------------------------------------


def test_a_corpus_of_segments_has_one_list_per_layer(
    folder: Path, reader: af.Model, tmp_path: Path
) -> None:
    texts = [LONG, "the key. Here", ""]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": each}) for each in texts))
    model, out = str(folder / "encoder"), tmp_path / "out"
    manifest = af.explain_corpus(
        tmp_path / "texts.jsonl", out, model=model, segments="sentences", layers=[1, 3]
    )
    assert (manifest.rows, manifest.errors) == (3, 1)
    table = af.read_corpus(out).to_pylist()
    for row, given in zip(table, texts, strict=False):
        shares = af.rollout_segments(
            af.load(model), given, segments="sentences", layers=[1, 3], positions=[0]
        )
        assert row["segments"] == list(shares.tokens)
        assert row["segment_tokens"] == [len(group.positions) for group in shares.groups or ()]
        assert np.abs(np.array(row["rollout"]) - shares.values[:, 0]).max() < 1e-6
    again = af.explain_corpus(tmp_path / "texts.jsonl", out)  # which recalls the options
    assert again.options.segments == "sentences"
    assert again.options.methods == ("rollout",)
    from attnflow.corpus.scores import top_words
    from attnflow.corpus.status import verify_corpus

    assert verify_corpus(out) == []
    with pytest.raises(af.OptionError, match="holds shares of sentences, not of tokens"):
        top_words(out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segments": "turns"}, "unknown segments 'turns'; choose from sentences, lines, words"),
        ({"methods": ["raw"]}, "are of rollout on attention; got methods"),
        ({"edges": "norm"}, "are of rollout on attention; got edges"),
        ({"position": "mean"}, "are of one position; got 'mean'"),
        ({"normalize": None}, "got normalize None: leave it out"),
    ],
)
def test_a_corpus_of_segments_refuses_what_it_cannot_have(
    options: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "texts.csv").write_text("text\nthe key\n")
    asked: dict[str, Any] = {"model": str(folder / "encoder"), "segments": "sentences", **options}
    with pytest.raises(af.OptionError, match=message):
        af.explain_corpus(tmp_path / "texts.csv", tmp_path / "out", **asked)


# ---- the command line ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(reader: af.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and prompts."""
    place = tmp_path_factory.mktemp("long")
    reader.model.save_pretrained(place / "encoder")
    reader.tokenizer.save_pretrained(place / "encoder")
    (place / "words.txt").write_text(WORDS)
    (place / "parts.txt").write_text("the\n# key\nis lost\n# key\nhere\n")
    (place / "chat.json").write_text('[{"role": "user", "content": "the key"}]')
    (place / "bad.json").write_text('{"role": "user"}')
    (place / "latin.txt").write_bytes(b"caf\xe9")
    return place


def command(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """The exit status of the command that shares segments, run in this process."""
    return run(monkeypatch, folder, "segments", "encoder", *arguments)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> int:
    """The exit status of the command line, run in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "argv", ["attnflow", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_shows_a_table_with_bars_and_writes_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert command(monkeypatch, folder, "words.txt") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rollout: from layer 3, position 0 ([CLS]), to segments"
    assert "Here is the key" in lines[3]
    assert "█" in lines[3] or "#" in lines[3]
    shares = [float(line.split("0.", 1)[1].split()[0]) for line in lines[2:]]
    assert len(shares) == 3
    assert command(monkeypatch, folder, "parts.txt", "--by", "marker", "--marker", "# key") == 0
    assert [name in capsys.readouterr().out for name in ("# key (2)",)] == [True]
    assert command(monkeypatch, folder, "chat.json", "--by", "turns") == 0
    assert "1 user" in capsys.readouterr().out
    assert command(monkeypatch, folder, "words.txt", "--by", "words", "--out", "w.json") == 0
    content = json.loads((folder / "w.json").read_text())
    assert content["layers"] == [1, 2, 3]
    assert content["tokens"][:2] == ["the", "key"]
    assert command(monkeypatch, folder, "words.txt", "--layer", "2", "--out", "w.csv") == 0
    assert (folder / "w.csv").read_text().count("\nrollout,2,0,") == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.txt"], "nothing.txt: No such file"),
        (["words.txt", "--by", "pages"], "unknown --by 'pages'; choose from sentences"),
        (["words.txt", "--by", "marker"], "--by marker and --marker TEXT belong together"),
        (["words.txt", "--marker", "#"], "--by marker and --marker TEXT belong together"),
        (["words.txt", "--by", "marker", "--marker", "§"], "the marker must stand in the text"),
        (["words.txt", "--by", "turns"], "words.txt must hold messages as JSON"),
        (["bad.json", "--by", "turns"], "must hold a list of messages"),
        (["latin.txt"], "a text cannot be read"),
        (["words.txt", "--out", "w.html"], "w.html"),
        (["words.txt", "--layer", "9"], "--layer must be from 1 to 3; got 9"),
        (["words.txt", "--position", "99"], "--position must be from -17 to 16; got 99"),
    ],
)
def test_a_bad_command_line_gets_one_clear_line(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
) -> None:
    assert command(monkeypatch, folder, *arguments) == 2
    said = capsys.readouterr().err.splitlines()
    said = [line for line in said if line and not line.startswith("Loading weights")]
    assert len(said) == 1
    assert message in said[0]


def test_a_folded_text_leaves_out_what_does_not_count(writer: af.Model, short_graphs: None) -> None:
    found = af.explain(LONG, model=writer)
    shown = Console(width=200, file=StringIO())
    print_segments(shown, found, found.depth, [0, found.position])
    row = found.rollout.at(found.position)
    row[[0, found.position]] = 0
    shares = [row[list(group.positions)].sum() / row.sum() for group in found.segments]
    printed = shown.file.getvalue()  # type: ignore[attr-defined]
    assert all(f"{share:.4f}" in printed for share in shares)


def test_long_texts_are_folded_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    writer: af.Model,
    short_graphs: None,
) -> None:
    writer.model.save_pretrained(folder / "decoder")
    writer.tokenizer.save_pretrained(folder / "decoder")
    assert run(monkeypatch, folder, "segments", "decoder", "words.txt") == 0
    said = capsys.readouterr()
    assert said.out.startswith("contribution rollout: from layer 3, position 16 ([SEP])")
    assert "--edges attention is that of 0.3" in " ".join(said.err.split())
    for edges, name in (("attention", "rollout: "), ("norm", "norm rollout: ")):
        assert run(monkeypatch, folder, "segments", "decoder", "words.txt", "--edges", edges) == 0
        said = capsys.readouterr()
        assert said.out.startswith(f"{name}from layer 3, position 16")
        assert "note" not in said.err
    assert run(monkeypatch, folder, "explain", LONG, "--model", "decoder") == 0
    said = capsys.readouterr()
    assert "Here the cabinets are lost?" in said.out
    assert "left out: " in said.out
    with patch.object(sys, "stdin", TextIOWrapper(BytesIO(f"{LONG}\n".encode()))):
        assert run(monkeypatch, folder, "explain", "-", "--model", "decoder") == 0
    assert capsys.readouterr().out == said.out
    assert "flow is left out: it needs the whole graph" in " ".join(said.err.split())
    assert run(monkeypatch, folder, "explain", LONG, "--model", "decoder", "--out", "l.html") == 0
    assert (folder / "l.html").stat().st_size > 1000
    capsys.readouterr()
    arguments = ["generate", "decoder", LONG, "--max-new-tokens", "3"]
    assert run(monkeypatch, folder, *arguments) == 0
    assert "rollout, layer 3 of 3, against the others:" in capsys.readouterr().out
    (folder / "texts.csv").write_text("text\n" + LONG + "\n")
    arguments = ["corpus", "run", "texts.csv", "--out", "shares", "--model", "encoder"]
    assert run(monkeypatch, folder, *arguments, "--segments", "sentences") == 0
    assert af.read_corpus(folder / "shares").column("segments").to_pylist()[0][0] == LONG[:16]
