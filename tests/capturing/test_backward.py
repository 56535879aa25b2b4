"""Backward rules against gradients of models whose parts are detached by hand; one forward pass for all of them."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import attnflow as af
from attnflow.analysis.importance.input_gradient import WATCH_KEY, read_input_gradients, watch_input
from attnflow.capturing.backward import Watch, run_backward
from attnflow.capturing.backward_rule import PLAIN
from attnflow.edges.edge_weight import read_edges
from attnflow.edges.graphs import compute_gradients, run_edges, watch_edges
from tests.corpora import sentences, table, write_csv
from tests.families import count_hooks, perturb
from tests.own_edges import (
    fixed_attention,
    fixed_both,
    fixed_norms,
    held,
    hold_scale,
    hold_weights,
    is_norm,
    linear,
    weigh,
)

TEXT = "the key to the cabinets"
IDS = [5, 6, 7, 8, 9, 10]
FAMILIES = ["llama", "gpt2", "gpt-neox", "roberta", "qwen3", "bart"]
RULES = {rule.name: rule for rule in (fixed_attention, fixed_norms, fixed_both)}
KEPT = "attnflow.capturing.checkpointing.KEPT"


# ---- the oracle: plain autograd, parts detached by hand ------------------------------------------


def detach_query_and_key(
    module: Any, given: Any, output: Any, *, side_by_side: bool = False
) -> Any:
    """Queries and keys are constants, which weights have a gradient by; fused ones give values too."""
    constant = output.detach().requires_grad_()
    if output.shape[-1] != 3 * given[0].shape[-1]:
        return constant
    # GPT-NeoX has the three of each head side by side, others those of all heads
    shape = (4, 3, -1) if side_by_side else (1, 3, -1)
    parts = [each.unflatten(-1, shape) for each in (constant, output)]
    return torch.cat([parts[0][..., :2, :], parts[1][..., 2:, :]], dim=-2).flatten(-3)


def detach_scale(module: Any, given: Any, output: Any) -> Any:
    state = given[0]
    if isinstance(module, torch.nn.LayerNorm):
        state = state - state.mean(-1, keepdim=True)
    epsilon = getattr(module, "eps", None) or module.variance_epsilon
    scale = (state.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt().detach()
    return scale * state * module.weight + getattr(module, "bias", 0.0)


QUERY_AND_KEY = ("q_proj", "k_proj", "query", "key", "c_attn", "query_key_value")


def differentiate(family: str, rule: af.BackwardRule) -> tuple[list[Any], Any]:
    """[head, query, key] per attention: the gradient of the predicted logit; and all logits."""
    model = perturb(family, "eager")
    for name, module in model.named_modules():
        if rule.attention is not None and name.endswith(QUERY_AND_KEY):
            side_by_side = name.endswith("query_key_value")
            module.register_forward_hook(partial(detach_query_and_key, side_by_side=side_by_side))
        if rule.module is not None and is_norm(module):
            module.register_forward_hook(detach_scale)
    wrapped = af.Model(model)
    encoded = wrapped.encode(IDS)
    ran = model(**wrapped.batch([encoded]), output_attentions=True)
    if wrapped.is_encoder_decoder:
        decoder = zip(ran.decoder_attentions, ran.cross_attentions, strict=True)
        layers = [*ran.encoder_attentions, *(one for both in decoder for one in both)]
    else:
        layers = list(ran.attentions)
    logits = wrapped.read_logits(ran, [wrapped.logit_position(encoded)])[0]
    found = torch.autograd.grad(logits[int(logits.argmax())], layers)
    return [gradient[0] for gradient in found], logits.detach()


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rule_gives_the_gradients_of_a_model_whose_parts_are_detached(
    family: str, rule: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = differentiate(family, RULES[rule])
    plain, _ = differentiate(family, PLAIN)
    if recomputed:
        monkeypatch.setattr(KEPT, 0)
    mixes = af.capture_mix(perturb(family), IDS, backward=RULES[rule])
    changed = 0.0
    for mix, gradient, other in zip(mixes, expected, plain, strict=True):
        assert mix.gradient is not None
        keys = gradient.shape[-1]
        seen = mix.attention[..., :keys] > 0
        scale = float(gradient.abs().max())
        missed = float((mix.gradient[..., :keys] - gradient)[seen].abs().max())
        assert missed < 2e-5 * max(1.0, scale)
        changed = max(changed, float((other - gradient)[seen].abs().max()) / max(1e-9, scale))
    assert changed > 1e-3  # the oracle is not autograd as it is


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
def test_a_linear_backward_pass_adds_up_to_the_logit(
    recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention, norms, activations and products held: a model without biases is linear."""
    if recomputed:
        monkeypatch.setattr(KEPT, 0)
    model = af.Model(perturb("llama"))
    watches = {rule: Watch(rule=rule, wanted=("blocks",)) for rule in (linear, fixed_both, PLAIN)}
    run_backward(model, [model.encode(IDS)], watches)  # where blocks are is found once
    with count_calls(model.model.model.layers[0].mlp) as calls:
        found = run_backward(model, [model.encode(IDS)], watches)
    assert len(calls) == (1 + len(watches) if recomputed else 1)
    logit = float(found.logits.max())
    sums = {
        rule.name: float((found.states["blocks"] * found.gradients[rule].states["blocks"]).sum())
        for rule in watches
    }
    assert sums["linear"] == pytest.approx(logit, rel=1e-5)
    assert abs(sums["plain"] - logit) > 1e-2 * abs(logit)
    assert abs(sums["fixed attention and norms"] - logit) > 1e-2 * abs(logit)


# ---- one forward pass, several backward passes ---------------------------------------------------


@contextmanager
def count_calls(module: torch.nn.Module) -> Iterator[list[int]]:
    calls: list[int] = []
    handle = module.register_forward_pre_hook(lambda *given: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("family", ["llama", "roberta", "gpt-oss"])
def test_several_rules_share_a_forward_pass_which_is_the_models_own(
    family: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if recomputed:
        monkeypatch.setattr(KEPT, 0)
    model = af.Model(perturb(family))
    inputs = [model.encode(IDS), model.encode(IDS[2:5])]
    rules = [fixed_both, PLAIN, fixed_attention]
    if family != "gpt-oss":
        rules.append(fixed_norms)
    watches = {rule: Watch([1, None], "log_probability", rule) for rule in rules}
    hooks = count_hooks(model.model)  # transformers leaves some where weights were asked for
    run_backward(model, inputs, watches)  # where blocks are is found once
    with count_calls(model.embedding) as calls:
        together = run_backward(model, inputs, watches)
    assert len(calls) == 1
    with torch.no_grad():
        places = [model.logit_position(each) for each in inputs]
        assert torch.equal(together.logits, model.logits(model.batch(inputs), places))
    for rule in rules:
        alone = run_backward(model, inputs, {"only": watches[rule]}).gradients["only"]
        found = together.gradients[rule]
        assert found.targets == alone.targets
        assert found.targets[0] == (1,)
        for number, gradient in alone.attention.items():  # sums in another order
            torch.testing.assert_close(found.attention[number], gradient, rtol=1e-4, atol=1e-6)
    first, last = (together.gradients[rule].attention[0] for rule in (rules[0], rules[-1]))
    assert float((first - last).abs().max()) > 1e-3 * float(first.abs().max())
    assert count_hooks(model.model) == hooks


def test_edge_weights_of_one_call_have_the_gradients_of_their_own_rules() -> None:
    model = af.Model(perturb("llama"))
    kinds = [af.edge_weight(f"of {rule.name}", weigh, backward=rule) for rule in RULES.values()]
    weights = read_edges([*kinds, "gradient", "norm"])
    af.attention_graph(model, IDS, edges="gradient")  # what the model is made of is found once
    with count_calls(model.embedding) as calls:
        inputs = [model.encode(IDS)]
        gradients = compute_gradients(model, inputs, watch_edges(model, weights, [3]))
        _, (graphs,) = run_edges(model, inputs, weights, gradients=gradients)
    assert len(calls) == 2  # one with gradients, one for the graphs
    for name, weight in weights.items():
        alone = af.attention_graph(model, IDS, edges=weight, target=3)
        np.testing.assert_allclose(graphs[name].edges, alone.edges, rtol=1e-5, atol=1e-6)
        assert graphs[name].source.target == (None if name == "norm" else "3")
    edges = [graph.edges for graph in graphs.values()]
    assert all(
        np.abs(one - other).max() > 1e-4
        for place, one in enumerate(edges)
        for other in edges[:place]
    )


@pytest.mark.parametrize("reduce", ["norm", "times_input"])
def test_edges_and_input_gradients_share_a_forward_pass(reduce: str) -> None:
    model = af.load()
    inputs = [model.encode(TEXT), model.encode("the keys")]
    targets: list[int | None] = [1, None]
    weights = read_edges("gradient")
    # what the model is made of is found once
    gradients = compute_gradients(model, inputs, watch_edges(model, weights, targets))
    _, alone = run_edges(model, inputs, weights, gradients=gradients)
    watches: dict[Any, Watch] = {
        **watch_edges(model, weights, targets),
        WATCH_KEY: watch_input(targets, reduce=reduce),
    }
    with count_calls(model.embedding) as calls:
        found = run_backward(model, inputs, watches)
    assert len(calls) == 1
    _, graphs = run_edges(model, inputs, weights, gradients=found.gradients)
    scored = read_input_gradients(model, inputs, found, reduce=reduce)
    expected = af.input_gradient(model, [TEXT, "the keys"], [1, None], reduce=reduce)
    for place in range(2):
        np.testing.assert_array_equal(scored[place].values, expected[place].values)
        assert scored[place].probability == expected[place].probability
        assert scored[place].target == expected[place].target
        for name in weights:
            np.testing.assert_array_equal(graphs[place][name].edges, alone[place][name].edges)


def test_threads_run_their_own_rules() -> None:
    model = af.Model(perturb("llama"))
    rules = [PLAIN, fixed_both, fixed_norms, fixed_attention] * 4

    def run(rule: af.BackwardRule) -> Any:
        found = run_backward(model, [model.encode(IDS)], {"it": Watch(rule=rule)})
        return found.gradients["it"].attention[0]

    alone = [run(rule) for rule in rules[:4]] * 4
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(run, rules))
    assert all(torch.equal(*pair) for pair in zip(alone, together, strict=True))


def test_blocks_may_be_recomputed_in_a_thread_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does where nodes are on an accelerator; here, the whole backward pass."""
    model = af.Model(perturb("llama"))
    expected = af.capture_mix(model, IDS, backward=fixed_both)
    plain = torch.autograd.grad
    monkeypatch.setattr(KEPT, 0)

    def run_elsewhere(*given: Any, **options: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(plain, *given, **options).result()

    monkeypatch.setattr(torch.autograd, "grad", run_elsewhere)
    for one, other in zip(af.capture_mix(model, IDS, backward=fixed_both), expected, strict=True):
        assert torch.equal(one.gradient, other.gradient)


# ---- an edge weight with a rule of its own, at every door ----------------------------------------


def detach_bundled(model: af.Model) -> Any:
    """The bundled model, whose queries, keys and norm scales are constants in the backward pass."""
    copy = deepcopy(model.model)
    for module in copy.modules():
        if getattr(module, "out_features", None) == 3 * getattr(module, "in_features", 0):
            module.register_forward_hook(detach_query_and_key)
        if is_norm(module):
            module.register_forward_hook(detach_scale)
    return af.Model(copy, model.tokenizer)


def test_an_edge_weight_with_its_own_rule_is_explained_and_has_a_page(tmp_path: Path) -> None:
    model = af.load()
    found = af.explain(TEXT, edges=["attention", held], methods="rollout", importance=())
    graph = af.attention_graph(detach_bundled(model), TEXT, edges="gradient")
    expected = af.rollout(graph).values
    np.testing.assert_allclose(found.results["held rollout"].values, expected, atol=1e-5)
    plain = af.rollout(af.attention_graph(model, TEXT, edges="gradient")).values
    assert np.abs(expected - plain).max() > 1e-3
    page = found.save(tmp_path / "held.html").read_text()
    assert "held rollout" in page


def test_an_edge_weight_with_its_own_rule_watches_each_generated_token() -> None:
    model = af.Model(perturb("llama"))
    options: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None}
    story = af.generate(model, IDS[:4], edges=[held], **options)
    result = story.by("rollout", edges="held")
    generated = model.model.generate(
        torch.tensor([IDS[:4]]), do_sample=False, pad_token_id=0, **options
    )[0].tolist()
    for number in range(3):
        seen = generated[: 4 + number]
        graph = af.attention_graph(model, seen, edges=held, target=generated[len(seen)])
        rolled = af.rollout(graph, positions=[len(seen) - 1], normalize=None).values[:, 0, :4]
        np.testing.assert_allclose(result.values[number], rolled.T, atol=1e-6)


def test_an_edge_weight_with_its_own_rule_runs_over_a_corpus(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    texts = write_csv(tmp_path / "texts.csv", sentences(6))
    options: dict[str, Any] = {"methods": "rollout", "layers": 6, "shard_rows": 3}
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        af.explain_corpus(texts, out, edges="tests.own_edges:held", workers=workers, **options)
        for row in table(out).to_pylist():
            graph = af.attention_graph(af.load(), row["text"], edges=held)
            expected = af.rollout(graph, layers=[6]).at(0)
            np.testing.assert_allclose(row["held rollout"], [expected], atol=1e-5)


# ---- what is refused -----------------------------------------------------------------------------


OUTSIDE: dict[str, Callable[[], Any]] = {
    "GPTJ": lambda: transformers.GPTJForCausalLM(
        transformers.GPTJConfig(
            vocab_size=60, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=40
        )
    ),
    "GPTNeo": lambda: transformers.GPTNeoForCausalLM(
        transformers.GPTNeoConfig(
            vocab_size=60,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global"], 2]],
            max_position_embeddings=40,
        )
    ),
    "Mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(vocab_size=60, d_model=32, n_layers=2, n_heads=4, max_seq_len=40)
    ),
    "CodeGen": lambda: transformers.CodeGenForCausalLM(
        transformers.CodeGenConfig(
            vocab_size=60, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, n_positions=40
        )
    ),
    "XGLM": lambda: transformers.XGLMForCausalLM(
        transformers.XGLMConfig(
            vocab_size=60,
            d_model=32,
            num_layers=2,
            attention_heads=4,
            ffn_dim=48,
            max_position_embeddings=40,
        )
    ),
}


@pytest.mark.parametrize("family", OUTSIDE)
def test_families_outside_of_the_interface_have_no_gradient_edges(family: str) -> None:
    model = af.Model(OUTSIDE[family]())
    with pytest.raises(af.CaptureError) as error:
        af.attention_graph(model, IDS, edges="gradient")
    assert str(error.value) == (
        f"{model.name} attends outside of transformers' attention interface, so gradient edges are"
        " not available for this model; use attention edges"
    )
    assert af.input_gradient(model, IDS).values.min() > 0  # which needs no attention


def return_always(value: Any) -> Callable[..., Any]:
    return lambda *given: value


def give_keys(query: Any, key: Any, value: Any) -> Any:
    return key, key


MISTAKES: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: af.edge_weight("mine", weigh, backward="plane"),
        "unknown backward rule 'plane'; choose from plain",
    ),
    (lambda: af.capture_mix(af.load(), TEXT, backward="no"), "unknown backward rule 'no'"),
    (lambda: af.BackwardRule("mine", attention=3), "attention of backward rule 'mine' must be a"),  # type: ignore[arg-type]
    (lambda: af.BackwardRule(""), "the name of a backward rule must be a text; got ''"),
    (lambda: af.BackwardRule("mine", applies_to=is_norm), "got module=None: give both"),
    (
        lambda: run(af.BackwardRule("mine", attention=return_always(None))),
        "attention of backward rule 'mine' at model.layers.2.self_attn must return three tensors",
    ),
    (
        lambda: run(af.BackwardRule("mine", attention=give_keys)),
        "got (1, 2, 6, 8), (1, 2, 6, 8)",
    ),
    (
        lambda: run(
            af.BackwardRule("mine", module=return_always(torch.zeros(2)), applies_to=is_norm)
        ),
        "module of backward rule 'mine' at model.norm must return None or a tensor of shape",
    ),
    (
        lambda: run(af.BackwardRule("mine", module=lambda call: 1 / 0, applies_to=is_norm)),
        "module of backward rule 'mine' at model.norm failed: ZeroDivisionError",
    ),
    (
        lambda: af.attention_graph(af.load(), TEXT, target_of="odds"),
        "unknown target_of 'odds'; choose from logit, log_probability, probability",
    ),
    (lambda: af.attention_graph(af.load(), TEXT, target="dual"), "unknown target 'dual'"),
    (
        lambda: af.attention_graph(af.load(), TEXT, edges="norm", target=("plural", 1)),
        "a contrast is between two different targets; got 'plural' twice",
    ),
    (
        lambda: af.explain(TEXT, edges="attention", importance=(), target=("plural", "plural")),
        "a contrast is between two different targets",
    ),
]


def run(rule: af.BackwardRule) -> Any:
    return af.capture_mix(perturb("llama"), IDS, backward=rule)


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes_are_one_line(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(af.OptionError) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_gradient_is_the_old_name_of_a_plain_backward_pass() -> None:
    with pytest.warns(FutureWarning, match=r"edge_weight\(backward='plain'\)"):
        old = af.edge_weight("mine", weigh, gradient=True)
    assert old.backward is af.BACKWARD_RULES["plain"] is PLAIN
    assert af.edge_weight("mine", weigh).backward is None
    with pytest.warns(FutureWarning, match="is now backward"):
        assert old.gradient
    with pytest.warns(FutureWarning, match=r"capture_mix\(backward='plain'\)"):
        first = af.capture_mix(af.load(), TEXT, gradient=True)[0]
    same = af.capture_mix(af.load(), TEXT, backward="plain")[0]
    assert torch.equal(first.gradient, same.gradient)


def test_the_rules_of_the_module_are_those_that_are_tested() -> None:
    assert fixed_both == af.BackwardRule(
        "fixed attention and norms", attention=hold_weights, module=hold_scale, applies_to=is_norm
    )
    assert len({fixed_both, fixed_norms, fixed_attention, PLAIN}) == 4
