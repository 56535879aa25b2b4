"""What enters is checked and becomes the graph that DESIGN promises: weights, fusion, residual, masks, files."""

import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow.core import arrays, layers
from attnflow.core.provenance import Source
from attnflow.notices import collect_notices
from tests.oracles import Floats, Igraph, any_attention, any_capacities, attention, rational_flow

RNG = np.random.default_rng(0)


def heads(layers: int = 3, count: int = 4, size: int = 5, kind: str = "peaky") -> Floats:
    """[layer, head, query, key]."""
    return np.stack([attention(kind, count, size, RNG) for _ in range(layers)])


# ---- arrays of every library ----------------------------------------------------------------------------------------------------


class ArrayOnly:
    """An array of another library (JAX, TensorFlow) that numpy can only ask for its contents."""

    def __init__(self, array: Floats) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        return np.asarray(self.array, dtype=dtype)


class DlpackOnly:
    """An array of another library that hands out its memory by dlpack only."""

    def __init__(self, array: Floats) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


WEIGHTS = heads()


@pytest.mark.parametrize(
    ("given_as", "tolerance"),
    [
        (WEIGHTS, 0),
        (WEIGHTS.tolist(), 0),
        (WEIGHTS.astype(np.float32), 1e-7),
        (WEIGHTS.astype(np.float16), 1e-3),
        (torch.tensor(WEIGHTS, requires_grad=True), 0),
        (torch.tensor(WEIGHTS).float(), 1e-7),
        (torch.tensor(WEIGHTS).bfloat16(), 1e-2),
        (torch.tensor(WEIGHTS).half(), 1e-3),
        (torch.tensor(WEIGHTS).transpose(2, 3).contiguous().transpose(2, 3), 0),
        ([torch.tensor(layer[None]) for layer in WEIGHTS], 0),
        (tuple(torch.tensor(layer[None]).bfloat16() for layer in WEIGHTS), 1e-2),
        (list(WEIGHTS), 0),
        (WEIGHTS[:, None], 0),
        (ArrayOnly(WEIGHTS), 0),
        ([ArrayOnly(layer[None]) for layer in WEIGHTS], 0),
        (DlpackOnly(WEIGHTS), 0),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int | float) else None,
)
def test_weights_of_every_library_enter_as_they_are(given_as: Any, tolerance: float) -> None:
    attention = af.Attention(given_as)
    assert attention.weights.shape == (3, 4, 5, 5)
    assert np.abs(attention.weights - WEIGHTS).max() <= tolerance + 1e-15
    assert np.abs(attention.graph().edges.sum(axis=-1) - 1).max() < 1e-14


def test_integers_and_booleans_are_weights_too() -> None:
    assert af.Attention(np.eye(3, dtype=int)[None]).graph().edges.tolist() == [np.eye(3).tolist()]


def test_layers_of_different_precisions_are_all_of_the_lowest() -> None:
    mixed = [WEIGHTS[0, 0], (WEIGHTS[1, 0] * (1 + 9e-7)).astype(np.float32), WEIGHTS[2, 0]]
    graph = af.Attention(mixed).graph(residual=0.0)
    assert graph.weights.dtype == np.float32
    assert np.abs(graph.edges.sum(axis=-1) - 1).max() < 1e-14


def test_what_was_given_is_not_changed() -> None:
    mine = heads().astype(np.float32)
    before = mine.copy()
    af.flow(af.Attention(mine).graph(without=[0]), layers=[2])
    assert (mine == before).all()


@pytest.mark.parametrize(
    ("precision", "off", "fits"),
    [("f8", 9e-7, True), ("f8", 2e-6, False), ("f4", 9e-5, True), ("f4", 2e-4, False)],
)
@pytest.mark.parametrize("of", [af.Attention, af.AttentionGraph])
def test_rows_may_be_off_by_their_precision_only(
    of: Any, precision: str, off: float, fits: bool
) -> None:
    weights = (heads(kind="flat")[:, 0] * (1 + off)).astype(precision)
    if fits:
        assert np.abs(of(weights).weights.sum(axis=-1) - 1).max() < 1e-6
    else:
        with pytest.raises(af.WeightsError, match="rows of the weights must sum to 1 within"):
            of(weights)


def test_a_graph_of_float32_or_of_tensors_is_exact_too() -> None:
    """Rows of float32 sum to 1 only nearly; in a graph they do so in float64, or flow through many layers would drift."""
    weights = np.full((9, 8, 8), 1 / 8, np.float32)
    weights[8], weights[7], weights[6], weights[5] = (
        np.eye(8),
        (1 - 9e-7) / 8,
        (1 + 9.5e-7) / 8,
        (1 + 9.5e-7) / 8,
    )
    graph = af.AttentionGraph(weights, residual=0)
    assert np.abs(graph.edges.sum(axis=-1) - 1).max() < 1e-14
    with pytest.warns(af.SaturationWarning):
        flowed = af.flow(graph, normalize=None).at(0)[0]
    assert abs(flowed - af.max_flow(graph, source=(9, 0), target=(0, 0)).value) < 1e-12
    layers = [torch.tensor(layer, requires_grad=True) for layer in WEIGHTS[:, 0]]
    assert np.abs(af.AttentionGraph(layers).weights - WEIGHTS[:, 0]).max() < 1e-15
    assert af.AttentionGraph([layer.bfloat16() for layer in layers]).depth == 3


# ---- what came in is what is held ----------------------------------------------------------------


def test_a_graph_shares_the_memory_of_fused_attention_and_nobody_can_write_to_it() -> None:
    for held in (
        af.Attention(WEIGHTS[:, 0].astype(np.float32)),
        af.Attention(WEIGHTS[:, :1]),
    ):
        graph = held.graph()
        assert np.shares_memory(graph.weights, held.weights)
        assert graph.weights.dtype == held.weights.dtype
        for array in (held.weights, graph.weights, graph.edges):
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 0.0
        assert not np.shares_memory(held.graph(without=[0]).weights, held.weights)
    mine = WEIGHTS.copy()
    assert np.shares_memory(af.Attention(mine, copy=False).weights, mine)
    mine[0] = 0.0  # it stays its owner's


@settings(max_examples=60, deadline=None)
@given(any_attention(max_layers=7, max_size=9), st.sampled_from([0.0, 0.3, 0.5]), st.booleans())
def test_float32_gives_what_its_rows_give_in_float64(
    weights: Floats, residual: float, take_one_out: bool
) -> None:
    """Renormalised layer by layer or all at once, held in float32 or in float64: the same."""
    single = weights.astype(np.float32)
    double = single.astype(np.float64)
    double /= double.sum(axis=-1, keepdims=True)
    gone = [0] if take_one_out and weights.shape[-1] > 1 else []
    one, two = (
        af.Attention(each).graph(residual=residual, without=gone) for each in (single, double)
    )
    assert one.weights.dtype == np.float32
    assert two.weights.dtype == np.float64
    tolerance = 1e-6 if gone else 1e-12  # what is left of a row is rounded to float32 again
    for layer in range(1, one.depth + 1):
        assert (one.layer_edges(layer) == one.edges[layer - 1]).all()
        assert np.abs(one.layer_edges(layer) - two.layer_edges(layer)).max() <= tolerance
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", af.SaturationWarning)
        for method in af.METHODS.values():
            for normalize in ("sum", None):
                first, second = (method(each, normalize=normalize).values for each in (one, two))
                assert np.abs(first - second).max() <= tolerance
    ends: dict[str, Any] = {"source": (one.depth, one.kept[0]), "target": (0, one.kept[-1])}
    best, other = (af.max_flow(each, **ends) for each in (one, two))
    assert abs(best.value - other.value) <= tolerance
    assert abs(best.cut_capacity - best.value) <= 1e-12


@pytest.mark.parametrize("kind", ["flat", "causal", "window"])
def test_one_row_costs_one_row(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the weights: rollout holds some rows in float64, flow the inner layers once."""
    monkeypatch.setattr(arrays, "SLAB", 2**12)
    monkeypatch.setattr(layers, "BLOCK", 2**12)
    weights = attention(kind, 10, 200, np.random.default_rng(0)).astype(np.float32)
    peak = {}
    with collect_notices():
        for method in (af.raw, af.rollout, af.flow):
            method(np.full((4, 2, 2), 0.5, np.float32), layers=[4])  # kernels are compiled
            tracemalloc.start()
            graph = af.Attention(weights, copy=False).graph()
            method(graph, layers=[10], positions=[150], normalize=None)
            peak[method.__name__] = tracemalloc.get_traced_memory()[1] / weights.nbytes
            tracemalloc.stop()
    assert peak["raw"] < 0.15
    assert peak["rollout"] < 0.15
    # 2 x 8 of 10 layers in float64, and the bits of the search, which are less in a longer input
    assert peak["flow"] < 2.5


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = af.AttentionGraph(attention("peaky", 5, 23, RNG).astype(np.float32))
    whole = [af.rollout(graph, layers=[5, 2], positions=[7, 3]).values, graph.edges.sum(axis=1)]
    monkeypatch.setattr(layers, "BLOCK", 50)  # two rows at a time, and one left over
    parts = [af.rollout(graph, layers=[5, 2], positions=[7, 3]).values]
    parts += [np.stack([graph.edge_layers.sum_columns(layer) for layer in range(5)])]
    for first, second in zip(whole, parts, strict=True):
        assert np.abs(first - second).max() < 1e-14


def test_a_layers_number_is_checked() -> None:
    graph = af.AttentionGraph(WEIGHTS[:, 0])
    for number in (0, 4, -1):
        with pytest.raises(af.OptionError, match="a layer's number must be from 1 to 3"):
            graph.layer_edges(number)


def test_edges_given_in_float32_stay_so() -> None:
    edges = RNG.random((3, 4, 4)).astype(np.float32) * 7
    graph = af.AttentionGraph(edges=edges)
    assert graph.weights.dtype == np.float32
    assert (graph.edges == edges.astype(np.float64)).all()
    double = af.AttentionGraph(edges=edges.astype(np.float64))
    for method in af.METHODS.values():
        first, second = (method(each, normalize=None).values for each in (graph, double))
        assert np.abs(first - second).max() < 1e-12


# ---- fusion ---------------------------------------------------------------------------------------------------------------------


def test_heads_are_fused_by_mean_max_min_one_head_or_a_function() -> None:
    attention = af.Attention(WEIGHTS)
    fusions: list[tuple[Any, Floats]] = [
        ("mean", WEIGHTS.mean(axis=1)),
        ("max", WEIGHTS.max(axis=1)),
        ("min", WEIGHTS.min(axis=1)),
        (2, WEIGHTS[:, 2]),
        (np.median, np.median(WEIGHTS, axis=1)),
        (lambda weights, axis: weights[:2].sum(axis=axis), WEIGHTS[:, :2].sum(axis=1)),
    ]
    for fusion, expected in fusions:
        graph = attention.graph(heads=fusion)
        assert np.abs(graph.weights - expected / expected.sum(axis=-1, keepdims=True)).max() < 1e-15


def test_a_row_that_min_leaves_empty_looks_at_itself() -> None:
    opposed = np.array([[[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]]])
    assert af.Attention(opposed).graph(heads="min").weights.tolist() == [[[1.0, 0.0], [0.5, 0.5]]]


def test_residual_is_mixed_in_by_the_formula() -> None:
    for residual in (0.0, 0.3, 0.5):
        graph = af.Attention(WEIGHTS).graph(residual=residual)
        assert (
            np.abs(
                graph.edges - ((1 - residual) * WEIGHTS.mean(axis=1) + residual * np.eye(5))
            ).max()
            < 1e-15
        )


def test_top_head_ends_the_graph_with_one_head_over_averaged_layers() -> None:
    graph = af.Attention(WEIGHTS).graph(top_head=(2, 3), residual=0.4)
    assert graph.depth == 2
    direct = (0.6 * WEIGHTS[1, 3] + 0.4 * np.eye(5)) @ (
        0.6 * WEIGHTS[0].mean(axis=0) + 0.4 * np.eye(5)
    )
    assert np.abs(af.rollout(graph).values[-1] - direct).max() < 1e-14
    assert np.abs(af.raw(graph).at(1, layer=2) - WEIGHTS[1, 3, 1]).max() < 1e-15


def test_without_takes_a_position_out_before_the_residual() -> None:
    """Three tokens, worked by hand: token 0 leaves, row 1 was (0.5, 0.1, 0.4), row 2 looked at nothing else."""
    weights = np.array([[[0.2, 0.4, 0.4], [0.5, 0.1, 0.4], [1.0, 0.0, 0.0]]])
    graph = af.Attention(weights, tokens=["a", "b", "c"]).graph(without=[0])
    assert np.allclose(
        graph.edges[0],
        [[0.0, 0.0, 0.0], [0.0, 0.5 + 0.5 * 0.2, 0.5 * 0.8], [0.0, 0.0, 1.0]],
        atol=1e-15,
    )
    rolled = af.rollout(graph)
    assert rolled.positions == (1, 2)
    assert rolled.tokens == ("a", "b", "c")  # positions keep their numbers
    assert np.allclose(rolled.values[0], [[0.0, 0.6, 0.4], [0.0, 0.0, 1.0]])
    assert np.allclose(af.flow(graph, normalize=None).values[0], [[0.0, 0.6, 0.4], [0.0, 0.0, 1.0]])
    with pytest.raises(af.OptionError, match="position 0 was taken out"):
        af.rollout(graph, positions=[0])
    with pytest.raises(af.OptionError, match="position 0 was taken out"):
        af.max_flow(graph, source=(1, 1), target=(0, 0))


# ---- masks ----------------------------------------------------------------------------------------------------------------------


def test_causal_is_found_out() -> None:
    assert af.Attention(heads(kind="causal")).causal is True
    assert af.Attention(heads(kind="flat")).causal is False
    assert af.Attention(np.ones((2, 1, 1))).causal is False  # one token alone
    with pytest.raises(af.WeightsError, match=r"mask hides a key \(causal=True"):
        af.Attention(heads(kind="flat"), causal=True)


def test_a_declared_mask_clears_what_rounding_left() -> None:
    weights = heads(kind="causal")
    weights[..., 0, 1] = 1e-9
    attention = af.Attention(weights, causal=True)
    assert attention.weights[..., 0, 1].max() == 0
    assert np.abs(attention.weights.sum(axis=-1) - 1).max() < 1e-15


def test_windows_are_one_for_all_or_one_a_layer() -> None:
    weights = heads(kind="window")  # a query sees itself and two before it
    assert af.Attention(weights, window=3).graph().window == (3, 3, 3)
    assert af.Attention(weights, window=[3, None, 4]).graph(top_head=(2, 0)).window == (3, None)
    with pytest.raises(af.WeightsError, match=r"mask hides a key \(causal=True, window=2"):
        af.Attention(weights, window=2)


# ---- files ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(any_attention(), st.data())
def test_what_is_saved_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, weights: Floats, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("saved") / "weights.npz"
    size = weights.shape[-1]
    tokens = data.draw(st.none() | st.lists(st.text(), min_size=size, max_size=size))
    words = data.draw(
        st.none() | st.lists(st.none() | st.integers(0, 5), min_size=size, max_size=size)
    )
    precision = data.draw(st.sampled_from([np.float32, np.float64]))
    first = af.Attention(weights.astype(precision), tokens=tokens, words=words)
    first.save(path)
    second = af.Attention.load(path)
    assert (first.weights == second.weights).all()
    assert first.weights.dtype == second.weights.dtype == precision
    for name in ("tokens", "words", "causal", "window", "fused"):
        assert getattr(first, name) == getattr(second, name)


def test_the_share_of_no_token_is_kept(tmp_path: Path) -> None:
    share = RNG.random((3, 5))
    path = af.Attention(WEIGHTS, no_token_share=share).save(tmp_path / "share.npz")
    kept = af.Attention.load(path).no_token_share
    assert kept is not None
    assert (kept == share).all()
    assert "sink" not in np.load(path).files


def test_the_share_is_read_from_files_that_call_it_a_sink(tmp_path: Path) -> None:
    share = RNG.random((3, 5))
    np.savez(tmp_path / "old.npz", weights=WEIGHTS, sink=share)
    kept = af.Attention.load(tmp_path / "old.npz").no_token_share
    assert np.array_equal(kept, share)  # type: ignore[arg-type]


def test_where_weights_came_from_goes_all_the_way(tmp_path: Path) -> None:
    source = Source("verb-number", "0a1b", {"attnflow": "0.3"}, target="singular")
    path = af.Attention(WEIGHTS, source=source).save(tmp_path / "weights.npz")
    attention = af.Attention.load(path)
    assert attention.source == source
    graph = attention.graph(residual=0.25)
    assert graph.edge_name == "attention"
    assert graph.source == replace(source, edges="attention", residual=0.25, heads="mean")
    assert graph.uniform().source == graph.source
    result = af.rollout(graph)
    assert (result.edges, result.size) == ("attention", 5)
    assert result.source == replace(graph.source, method="rollout")
    best = af.max_flow(graph, source=(1, 0), target=(0, 0))
    assert best.provenance == replace(graph.source, method="max_flow")
    nowhere = af.Attention(WEIGHTS).graph().source
    assert (nowhere.model, nowhere.edges, nowhere.residual) == (None, "attention", 0.5)
    assert "attnflow" in nowhere.versions


def test_edges_of_any_kind_say_what_they_weigh() -> None:
    edges = RNG.random((2, 3, 3))
    given_source = Source("mine", edges="norm", target="cat")
    graph = af.AttentionGraph(edges=edges)
    assert (graph.edge_name, graph.source.edges, graph.source.residual) == ("given", "given", None)
    named = af.AttentionGraph(edges=edges, edge_name="norm", source=given_source)
    assert (named.edge_name, named.source) == ("norm", given_source)
    assert af.rollout(named).edges == "norm"
    mixed = af.AttentionGraph(WEIGHTS[:, 0], edge_name="gradient", residual=0.2)
    assert (mixed.source.edges, mixed.source.residual) == ("gradient", 0.2)


def test_plain_arrays_and_foreign_npz_files_load(tmp_path: Path) -> None:
    np.save(tmp_path / "plain.npy", WEIGHTS)
    np.savez(tmp_path / "one.npz", attentions=WEIGHTS)
    np.savez(tmp_path / "named.npz", weights=WEIGHTS, tokens=np.array(list("abcde")))
    assert (
        af.Attention.load(tmp_path / "plain.npy").weights == af.Attention(WEIGHTS).weights
    ).all()
    assert (af.Attention.load(tmp_path / "one.npz").weights == af.Attention(WEIGHTS).weights).all()
    assert af.Attention.load(tmp_path / "named.npz").tokens == tuple("abcde")


def test_saving_leaves_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights.npz"
    af.Attention(WEIGHTS).save(path)
    before = path.read_bytes()

    def full_disk(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(af.FileError, match="No space left on device"):
        af.Attention(WEIGHTS[:1]).save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["weights.npz"]


# ---- bad input ------------------------------------------------------------------------------------------------------------------


def changed(place: tuple[int, ...], value: float) -> Floats:
    weights = WEIGHTS.copy()
    weights[place] = value
    return weights


BAD_WEIGHTS: list[tuple[Any, str]] = [
    (
        changed((1, 2, 3, 4), np.nan),
        "finite and not negative; got nan at layer 2, head 2, query 3, key 4",
    ),
    (
        changed((0, 0, 0, 0), np.inf),
        "finite and not negative; got inf at layer 1, head 0, query 0, key 0",
    ),
    (
        changed((2, 3, 4, 0), -0.5),
        "finite and not negative; got -0.5 at layer 3, head 3, query 4, key 0",
    ),
    (WEIGHTS * 2, "layer 1, head 0, query 0 sums to 2 "),
    (np.zeros((1, 3, 3)), "sums to 0 "),
    (WEIGHTS[..., :4], "square"),
    (WEIGHTS[0, 0], "4 axes"),
    (WEIGHTS[None, None], "one sequence|4 axes"),
    (np.empty((0, 3, 3)), "empty"),
    (np.empty((2, 0, 3, 3)), "empty"),
    (np.empty((2, 1, 0, 0)), "empty"),
    ([], "returned no attention weights; load it with attn_implementation='eager'"),
    ((), "attn_implementation='eager'"),
    (None, "attn_implementation='eager'"),
    (np.ma.masked_array(WEIGHTS, mask=WEIGHTS > 0.5), "masked array"),
    (torch.empty((1, 2, 2), device="meta"), "one array of numbers"),
    (np.full((1, 3, 3), 1e308), "sums to inf"),
    ([None, None], "attn_implementation='eager'"),
    ([WEIGHTS[0], WEIGHTS[0, :, :3, :3]], "same shape"),
    ([np.stack([WEIGHTS[0]] * 2)], "one sequence"),
    ("weights", "real numbers"),
    (WEIGHTS.astype(complex), "real numbers"),
    (np.array([[[object()]]]), "real numbers"),
    ([[[1.0], [0.5, 0.5]]], "its parts of one shape"),
]


@pytest.mark.parametrize(("weights", "message"), BAD_WEIGHTS)
def test_bad_weights_get_one_clear_line(weights: Any, message: str) -> None:
    with pytest.raises(af.WeightsError, match=message) as error:
        af.Attention(weights)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)


BAD_OPTIONS: list[tuple[Any, str]] = [
    (
        lambda: af.Attention(WEIGHTS, tokens=["a"]),
        "tokens must be one name per position, here 5; got 1",
    ),
    (lambda: af.Attention(WEIGHTS, tokens="abcde"), "got one string"),
    (lambda: af.Attention(WEIGHTS, words=[0, 1]), "words must be one number"),
    (
        lambda: af.Attention(WEIGHTS, words=[0, 1, 2, 3, 1.7]),  # type: ignore[list-item]
        "words must be whole numbers; got 1.7",
    ),
    (lambda: af.Attention(WEIGHTS, words=[0, 1, 2, 3, 2**80]), "words must be whole numbers"),
    (lambda: af.Attention(WEIGHTS, words=5), "words must be a list"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS, tokens=5), "tokens must be a list"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS, tokens=[b"a"] * 5), "tokens must be strings"),  # type: ignore[list-item]
    (lambda: af.Attention(WEIGHTS, tokens="x" * 9000), "got one string"),
    (lambda: af.Attention(WEIGHTS, causal="False"), "causal must be True, False, or None"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS, window=2.5), "a window must be"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS, window=2**80), "a window must be"),
    (lambda: af.Attention(WEIGHTS[:, :1], fused=object()), "fused must say"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS, no_token_share=np.full((3, 5), np.nan)), "must be shares"),
    (lambda: af.Attention(WEIGHTS).graph(without=None), "without must be"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS).graph(residual=0.5 + 3j), "residual must be"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS).graph(residual=np.full((20, 20), 0.5)), "residual must be"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS).graph(heads=np.array([1, 2])), "heads must be a name"),  # type: ignore[arg-type]
    (
        lambda: af.Attention(WEIGHTS).graph(heads=lambda weights: weights[0]),
        "called as f.weights, axis=0.",
    ),
    (lambda: af.Attention(WEIGHTS, window=0), "a window must be"),
    (lambda: af.Attention(WEIGHTS, window=[1]), "one per layer"),
    (lambda: af.Attention(WEIGHTS, fused="mean"), "fused weights must have one head"),
    (lambda: af.Attention(WEIGHTS, no_token_share=np.zeros(3)), "no_token_share must have shape"),
    (lambda: af.AttentionGraph(WEIGHTS), "3 axes"),
    (lambda: af.Attention(WEIGHTS, grid=(0, 3)), "grid must be .down, across., both at least 1"),
    (lambda: af.Attention(WEIGHTS, grid=(2, 1.5)), "grid must be whole numbers; got 1.5"),  # type: ignore[arg-type]
    (lambda: af.Attention(WEIGHTS, source="mine"), "source must be a Source"),  # type: ignore[arg-type]
    (lambda: af.AttentionGraph(WEIGHTS[:, 0], source=3), "source must be a Source"),  # type: ignore[arg-type]
    (lambda: af.AttentionGraph(WEIGHTS[:, 0], edge_name=3), "edge_name must be a string"),  # type: ignore[arg-type]
    (
        lambda: af.AttentionGraph(WEIGHTS[:, 0], layer_names=("a",)),
        "layer_names must be one name per layer, here 3",
    ),
    (lambda: af.Attention(WEIGHTS).graph(residual=1.0), "residual must be a number from 0"),
    (lambda: af.Attention(WEIGHTS).graph(residual=-0.1), "residual must be"),
    (lambda: af.Attention(WEIGHTS).graph(residual=float("nan")), "residual must be"),
    (
        lambda: af.Attention(WEIGHTS).graph(heads="median"),
        "unknown head fusion 'median'; choose from mean, max, min",
    ),
    (lambda: af.Attention(WEIGHTS).graph(heads=4), "from 0 to 3; got 4"),
    (lambda: af.Attention(WEIGHTS).graph(heads=-1), "from 0 to 3; got -1"),
    (
        lambda: af.Attention(WEIGHTS).graph(heads=1.5),  # type: ignore[arg-type]
        "heads must be a name, a head's number or a function; got 1.5",
    ),
    (
        lambda: af.Attention(WEIGHTS).graph(heads=lambda weights, axis: weights),
        "a head fusion must turn",
    ),
    (
        lambda: af.Attention(WEIGHTS).graph(top_head=(4, 0)),
        "layer of top_head must be from 1 to 3; got 4",
    ),
    (lambda: af.Attention(WEIGHTS).graph(top_head=(1, 9)), "from 0 to 3; got 9"),
    (
        lambda: af.Attention(WEIGHTS).graph(top_head=3),  # type: ignore[arg-type]
        "a pair .layer, head.; got 3",
    ),
    (lambda: af.Attention(WEIGHTS).graph(without=[5]), "without must be from -5 to 4; got 5"),
    (lambda: af.Attention(WEIGHTS).graph(without=range(5)), "leave at least one"),
    (lambda: af.Attention(WEIGHTS[:, 0]).graph(heads="max"), "fused over heads already .mean."),
    (lambda: af.Attention(WEIGHTS[:, 0]).graph(heads=0), "fused over heads already"),
    (lambda: af.Attention(WEIGHTS[:, 0]).graph(top_head=(1, 0)), "fused over heads already"),
]


@pytest.mark.parametrize(("call", "message"), BAD_OPTIONS)
def test_bad_options_get_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(af.AttnFlowError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("fusion", ["mean", "max", "min", 1, np.median])
def test_slabs_of_layers_change_nothing(fusion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(4), size=(7, 2, 4)).astype(np.float32)
    whole = af.Attention(weights).graph(heads=fusion).edges
    monkeypatch.setattr(
        arrays, "SLAB", 2 * weights[0].size
    )  # two layers at a time, and one left over
    np.testing.assert_array_equal(af.Attention(weights).graph(heads=fusion).edges, whole)
    weights[4, 1, 2, 3] = -1
    with pytest.raises(af.WeightsError, match=r"got -1\.0 at layer 5, head 1, query 2, key 3"):
        af.Attention(weights)
    weights[4, 1, 2, 3] = 2
    with pytest.raises(af.WeightsError, match=r"layer 5, head 1, query 2 sums to 2\."):
        af.Attention(weights)


# ---- edges of any kind --------------------------------------------------------------------------


@given(any_capacities(), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_rollout_and_flow_work_on_edges_of_any_sum(edges: Floats, seed: int) -> None:
    graph = af.AttentionGraph(edges=edges)
    depth, size, _ = edges.shape
    assert (graph.edges == edges).all()
    assert (af.raw(graph, normalize=None).values == edges).all()
    product = np.linalg.multi_dot([np.eye(size), *edges[::-1], np.eye(size)])
    rolled = af.rollout(graph, layers=[depth], normalize=None).values[0]
    assert np.abs(rolled - product).max() <= 1e-9 * max(1e-300, np.abs(product).max())
    source = seed % size
    scale = max(edges.sum(axis=-1).max(), 1e-300)
    row = af.flow(graph, positions=[source], normalize=None).at(source)
    every = af.flow(graph, layers=range(1, depth + 1), normalize=None).values[-1, source]
    oracle = Igraph(edges / scale)
    for target in range(size):
        expected = oracle.flow(source, target) * scale
        assert abs(row[target] - expected) <= 1e-9 * scale
        assert abs(every[target] - expected) <= 1e-9 * scale
    best = af.max_flow(graph, source=(depth, source), target=(0, seed % 7 % size))
    assert abs(best.value - row[seed % 7 % size]) <= 1e-9 * scale


def test_flow_on_edges_equals_rational_arithmetic() -> None:
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e-6, 1e6):
        edges = scale * rng.integers(0, 9, (4, 3, 3)).astype(float)
        found = af.flow(af.AttentionGraph(edges=edges), normalize=None).values[0]
        for source in range(3):
            for target in range(3):
                expected = rational_flow(edges, source, target)
                assert abs(found[source, target] - expected) <= 1e-9 * scale * 27


def test_a_graph_of_edges_keeps_masks_removed_positions_and_groups() -> None:
    edges = np.tril(np.random.default_rng(1).random((3, 4, 4))) * 5
    graph = af.AttentionGraph(edges=edges, tokens=list("abcd"), removed=[1])
    assert (graph.causal, graph.residual) == (True, None)
    assert (graph.edges[:, 1] == 0).all()
    assert (graph.edges[:, :, 1] == 0).all()
    assert (edges[:, 1] != 0).any()  # the given array is left alone
    assert repr(graph) == "<AttentionGraph: 3 layers, 4 causal positions, residual inside>"
    whole = af.flow(graph, positions=[3], groups=[[0, 2]], normalize=None).values
    assert whole[0, 0, 0] <= graph.edges[2, 3].sum() + 1e-12


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: af.AttentionGraph([[[1.0]]], edges=[[[1.0]]]), "of weights or of edges; got both"),
        (
            lambda: af.AttentionGraph(edges=[[[1.0]]], residual=0.5),
            "edges have the residual inside",
        ),
        (lambda: af.AttentionGraph(edges=[[[-1.0]]]), "not negative; got -1.0 at layer 1, query 0"),
        (lambda: af.AttentionGraph(edges=[[[np.nan]]]), "edges must be finite"),
        (lambda: af.AttentionGraph(edges=[[[1e308, 1e308]] * 2]), "finite row sums"),
        (lambda: af.AttentionGraph(edges=[[[1.0, 2.0]]]), "edges must be square"),
        (lambda: af.AttentionGraph(edges=[[1.0]]), "edges must have 3 axes"),
        (lambda: af.AttentionGraph(edges=[[[1.0, 1.0]] * 2], causal=True), "mask hides a key"),
        (lambda: af.AttentionGraph(), "weights are empty"),
        (
            lambda: af.rollout(af.AttentionGraph(edges=[[[2.0]]]), normalize="receptive_field"),
            "edges with the residual inside are not attention",
        ),
    ],
)
def test_bad_edges_get_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(af.AttnFlowError, match=message):
        call()
