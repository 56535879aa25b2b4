"""The linearised backward pass equals that of a model whose parts are held by hand, in float64.

`HeldModel` runs a model of transformers once, keeps what is to be fixed (attention weights, the scales of norms, the
ratios of activations, both factors of gated products, the router's weights), and computes with that in every later run. So
it is linear, which finite differences show without autograd; and its edges are loops of the formulas.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t

import attnflow as af
from attnflow.capturing.backward import Watch, run_backward
from attnflow.capturing.backward_rule import LINEAR_PARTS
from attnflow.capturing.capture import read_arguments
from tests.families import FAMILIES, GROUPED, PAIRS, VISION, make_input, text

ACTIVATIONS = ("act", "act_fn", "activation", "activation_fn", "intermediate_act_fn")
# of a gated MLP: the other factor, and the map of the product
OTHERS, MAPS = ("up_proj", "wi_1"), ("down_proj", "wo")
GATED = ("gate_proj", "wi_0")
# one of each kind of norm and MLP
CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama: pre-norm RMS, gated SiLU, grouped keys": ("llama", FAMILIES["llama"][1]),
    "qwen3: norms of queries and keys": ("qwen3", FAMILIES["qwen3"][1]),
    "gpt2: pre-norm layer norm, tanh GELU, fused projections": ("gpt2", FAMILIES["gpt2"][1]),
    "gpt-neox: attention beside the MLP": ("gpt-neox", FAMILIES["gpt-neox"][1]),
    "opt: ReLU": ("opt", FAMILIES["opt"][1]),
    "gemma2: norm on the branch, gated GELU, soft-caps": ("gemma2", FAMILIES["gemma2"][1]),
    "olmo2: norm on the branch alone": ("olmo2", text(t.Olmo2Config, **GROUPED)),
    "mixtral: mixture of experts": (
        "mixtral",
        text(t.MixtralConfig, num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    ),
    "bert: post-norm, GELU, pooler": ("bert", FAMILIES["bert"][1]),
    "vit: images": ("vit", FAMILIES["vit"][1]),
    "t5: two stacks, plain RMS, ReLU": ("t5", FAMILIES["t5"][1]),
    "t5: gated GELU": (
        "t5",
        text(
            t.T5Config,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_decoder_layers=2,
            num_heads=4,
            decoder_start_token_id=1,
            feed_forward_proj="gated-gelu",
        ),
    ),
    "bart: two stacks, post-norm": ("bart", FAMILIES["bart"][1]),
}
ATTEND = "eager_attention_forward"


def build_case(case: str) -> tuple[af.Model, Any]:
    """A tiny model in float64 that predicts, with norms and biases unlike initial ones; and its input."""
    family, config = CASES[case]
    if family in PAIRS:
        auto = t.AutoModelForSeq2SeqLM
    elif family in VISION:
        auto = t.AutoModelForImageClassification
    elif family == "bert":
        auto = t.AutoModelForSequenceClassification
    else:
        auto = t.AutoModelForCausalLM
    torch.manual_seed(0)
    network = auto.from_config(config(), attn_implementation="eager")
    if family == "mixtral":
        network.set_experts_implementation("eager")  # the default takes no float64
    generator = torch.Generator().manual_seed(3)
    for parameter in network.parameters():
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
    return af.Model(network.double().eval()), make_input(family)


class HeldModel:
    """A model with a linear copy of itself.

    Parameters
    ----------
    model, given
        The model, and the input at which its parts are held.
    """

    def __init__(self, model: af.Model, given: Any) -> None:
        encoded = model.encode(given)
        self.network = model.model
        self.names = {module: name for name, module in self.network.named_modules()}
        self.arguments: dict[str, Any] = dict(read_arguments(model, [encoded]))
        if model.is_vision:
            self.arguments = {name: each.double() for name, each in self.arguments.items()}
        self.position = model.logit_position(encoded)
        self.kept: dict[str, torch.Tensor] = {}
        self.now: dict[str, torch.Tensor] = {}  # of the current run
        self.shift: torch.Tensor | float = 0.0  # of the input of the first block
        self.values: dict[str, torch.Tensor] = {}  # of each attention, [head, key, width]
        self.outputs: dict[str, torch.Tensor] = {}  # [sequence, head, query, width]
        self.is_first = True
        with torch.no_grad():
            self.classes = self.run().topk(2).indices
        self.is_first = False

    def keep(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """What the first run computed here."""
        return self.kept.setdefault(name, value.detach())

    def run(self) -> torch.Tensor:
        """[class]: the logits at the position that predicts."""
        with self.held():
            logits = self.network(**self.arguments).logits[0]
        if logits.ndim == 1:
            return logits
        whole = self.now.get("lm_head", logits[None])[0, self.position]
        # a soft-cap of the logits
        capped = whole * self.keep("cap", logits[self.position] / whole)
        return capped

    def contrast(self, shift: torch.Tensor | float = 0.0) -> torch.Tensor:
        """The logit of the prediction minus that of the runner-up; shift: of the first block's input."""
        self.shift = shift
        logits = self.run()
        return logits[self.classes[0]] - logits[self.classes[1]]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within this context, the parts are held: as they are now in the first run, then as they were."""
        with ExitStack() as stack:
            blocks = next(m for m in self.network.modules() if isinstance(m, torch.nn.ModuleList))
            handle = blocks[0].register_forward_pre_hook(self.before_blocks, with_kwargs=True)
            stack.callback(handle.remove)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for home in {sys.modules[type(module).__module__] for module in self.names}:
                if hasattr(home, ATTEND):
                    patch.setattr(home, ATTEND, partial(self.attend, getattr(home, ATTEND)))
            for module, name in self.names.items():
                for hook in self.hooks_of(module, name):
                    stack.callback(hook.remove)
            yield

    def hooks_of(self, module: torch.nn.Module, name: str) -> Iterator[Any]:
        """Register what holds a module."""
        parent, _, last = name.rpartition(".")
        kind = type(module).__name__.lower()
        gated = any(hasattr(self.network.get_submodule(parent), each) for each in GATED)
        if "norm" in kind:
            yield module.register_forward_hook(self.hold_norm)
        elif last in ACTIVATIONS and not parent.endswith("experts"):
            yield module.register_forward_hook(self.hold_activation)
        elif "router" in kind:
            yield module.register_forward_hook(self.hold_router)
        elif kind.endswith("experts"):
            yield module.register_forward_hook(self.hold_experts)
        elif last in OTHERS or last == "lm_head":
            yield module.register_forward_hook(self.note)
        elif last in MAPS and gated:
            yield module.register_forward_pre_hook(self.hold_product)

    def before_blocks(self, module: Any, given: Any, named: Any) -> Any:
        """Shift the input of the first block."""
        state = given[0] if given else named["hidden_states"]
        self.now["input"] = state = (state + self.shift).detach().requires_grad_()
        return ((state, *given[1:]), named) if given else (given, named | {"hidden_states": state})

    def note(self, module: Any, given: Any, output: Any) -> None:
        """Note what a map returned."""
        self.now[self.names[module]] = output
        self.keep(self.names[module], output)

    def hold_norm(self, module: Any, given: Any, output: Any) -> Any:
        """w (x - m) s, with the s of the first run."""
        state, name = given[0], self.names[module]
        is_layer_norm = isinstance(module, torch.nn.LayerNorm)
        if is_layer_norm:
            state = state - state.mean(-1, keepdim=True)
        eps = next(
            getattr(module, key) for key in ("eps", "variance_epsilon") if hasattr(module, key)
        )
        scale = self.keep(name, (state.pow(2).mean(-1, keepdim=True) + eps) ** -0.5)
        gain = module.weight + 1 if "Gemma" in type(module).__name__ else module.weight
        return gain * state * scale + (module.bias if is_layer_norm else 0.0)

    def hold_activation(self, module: Any, given: Any, output: Any) -> Any:
        """h times the ratio of the first run."""
        name = self.names[module]
        held = given[0] * self.keep(name, output / given[0])
        self.now[name] = held
        self.keep(name + " output", held)
        return held

    def hold_product(self, module: Any, given: Any) -> Any:
        """Half of each factor times the other one of the first run."""
        parent = self.names[module].rpartition(".")[0] + "."
        (act,) = [each for each in ACTIVATIONS if parent + each in self.now]
        (other,) = [each for each in OTHERS if parent + each in self.now]
        return self.multiply(
            self.now[parent + act],
            self.now[parent + other],
            self.kept[parent + act + " output"],
            self.kept[parent + other],
        )

    @staticmethod
    def multiply(
        gate: torch.Tensor, other: torch.Tensor, gate_then: torch.Tensor, other_then: torch.Tensor
    ) -> torch.Tensor:
        """A gated product, linear in both factors together."""
        return (gate * other_then + gate_then * other) / 2

    def hold_router(self, module: Any, given: Any, output: Any) -> Any:
        """The experts and their weights of the first run."""
        name = self.names[module]
        logits, weights, chosen = output
        return logits, self.keep(name, weights), self.keep(name + " chosen", chosen)

    def hold_experts(self, module: Any, given: Any, output: Any) -> Any:
        """All experts for all tokens, weighted."""
        state, chosen, weights = given
        mixed = torch.zeros_like(state)
        for number in range(module.num_experts):
            name = f"{self.names[module]} {number}"
            entered, other = (state @ module.gate_up_proj[number].T).chunk(2, dim=-1)
            gate = entered * self.keep(name + " ratio", module.act_fn(entered) / entered)
            then = self.keep(name + " gate", gate), self.keep(name + " other", other)
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            mixed = mixed + share * (self.multiply(gate, other, *then) @ module.down_proj[number].T)
        if self.is_first:
            torch.testing.assert_close(mixed, output)
        return mixed

    def attend(
        self,
        compute: Any,
        module: Any,
        query: Any,
        key: Any,
        value: Any,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Values weighted by the attention of the first run."""
        name = self.names[module]
        if self.is_first:
            self.keep(name, compute(module, query, key, value, *rest, **options)[1])
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        self.values[name], self.outputs[name] = value[0].detach(), self.kept[name] @ value
        if self.outputs[name].requires_grad:
            self.outputs[name].retain_grad()
        return self.outputs[name].transpose(1, 2).contiguous(), self.kept[name]

    def attribute(self) -> dict[str, np.ndarray]:
        """[2, query, key] of each attention: the mean over heads of max(0, W G); and the sum of W G."""
        self.contrast().backward()
        found = {}
        for name, output in self.outputs.items():
            weights, gradient = self.kept[name][0], output.grad
            assert gradient is not None
            parts = np.zeros((2, *weights.shape[1:]))
            for head, query, key in np.ndindex(*weights.shape):
                part = weights[head, query, key] * (
                    gradient[0, head, query] @ self.values[name][head, key]
                )
                parts[0, query, key] += max(0.0, float(part)) / len(weights)
                parts[1, query, key] += float(part)
            found[name] = parts
        return found

    def relevance(self) -> np.ndarray:
        """[token]: the relevance of the input of the first block."""
        self.contrast().backward()
        state = self.now["input"]
        assert state.grad is not None
        shares: np.ndarray = (state * state.grad).sum(-1)[0].detach().numpy()
        return shares


def hold_weights(query: Any, key: Any, value: Any) -> Any:
    """Zeros for queries and keys."""
    return torch.zeros_like(query), torch.zeros_like(key), value


def find_part(model: af.Model, name: str, edges: np.ndarray, part: np.ndarray) -> np.ndarray:
    """The part [query, key] of a layer's edges that an attention computes: a view.

    Two stacks have the positions of the encoder before those of the decoder.
    """
    if not model.is_encoder_decoder:
        return edges
    queries, keys = part.shape
    rows = slice(queries) if "encoder" in name.split(".")[:2] else slice(-queries, None)
    crosses = "EncDecAttention" in name or "encoder_attn" in name
    columns = slice(keys) if crosses else rows
    return edges[rows, columns]


# as LINEARISED, without its check that tokens and biases add up, which two stacks do not
UNCHECKED = af.BackwardRule("linear", attention=hold_weights, linear=LINEAR_PARTS)


def differentiate_input(model: af.Model, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """[token, width]: the input of the first block, and attnflow's gradient with respect to it."""
    watch = Watch((None, af.RUNNER_UP), "logit", UNCHECKED, ("blocks",))
    found = run_backward(model, [model.encode(given)], {0: watch})
    return found.states["blocks"][0], found.gradients[0].states["blocks"][0]


@pytest.mark.parametrize("case", CASES)
def test_edges_equal_loops_over_a_linear_model(case: str) -> None:
    model, given = build_case(case)
    graph = af.attention_graph(model, given, edges="relevance", foil=af.RUNNER_UP)
    held = HeldModel(model, given)
    found = held.attribute()
    assert graph.depth == len(found)
    for layer, (name, (positive, _)) in enumerate(found.items(), start=1):
        edges = graph.layer_edges(layer) - np.eye(graph.size)
        part = find_part(model, name, edges, positive)
        np.testing.assert_allclose(part, positive, rtol=1e-4, atol=1e-6)
        part[:] = 0
        assert not edges.any()


@pytest.mark.parametrize("case", CASES)
def test_a_linear_model_changes_as_its_gradient_says(case: str) -> None:
    model, given = build_case(case)
    held = HeldModel(model, given)
    state, gradient = differentiate_input(model, given)
    np.testing.assert_allclose((state * gradient).sum(-1), held.relevance(), rtol=1e-5, atol=1e-6)
    generator = torch.Generator().manual_seed(5)
    step = torch.randn(state.shape, generator=generator, dtype=state.dtype) * state.std()
    with torch.no_grad():
        scores = [held.contrast(size * step) for size in (0.0, 1.0, -3.0)]
    expected, scale = float((step * gradient).sum()), float((step * gradient).abs().sum())
    assert float(scores[1] - scores[0]) == pytest.approx(expected, abs=1e-6 * scale)
    assert float(scores[2] - scores[0]) == pytest.approx(-3 * expected, abs=3e-6 * scale)


@pytest.mark.parametrize("case", [case for case in CASES if CASES[case][0] not in PAIRS])
def test_signed_edges_equal_the_recursion(case: str) -> None:
    model, given = build_case(case)
    graph = af.attention_graph(model, given, edges="signed_relevance", foil=af.RUNNER_UP)
    held = HeldModel(model, given)
    count = graph.size
    handed = np.zeros(count)  # of each node of the layer above
    handed[held.position] = float(held.contrast().detach())
    for layer, (_, signed) in reversed([*enumerate(held.attribute().values(), start=1)]):
        shares = np.zeros((count, count))
        for query in np.flatnonzero(handed):
            shares[query] = signed[query]
            shares[query, query] += handed[query] - signed[query].sum()
            np.testing.assert_allclose(
                graph.layer_edges(layer)[query] * handed[query], shares[query], rtol=1e-4, atol=1e-5
            )
        handed = shares.sum(axis=0)
