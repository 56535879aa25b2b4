"""Wiring patterns: those that ship, one that is defined here, and threads that share one model."""

import sys
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.models.hooks import watch_modules
from attnflow.models.wiring.find import PATTERNS, find_wirings, use_patterns
from attnflow.models.wiring.parallel import Parallel
from attnflow.models.wiring.post_norm import PostNorm
from attnflow.models.wiring.pre_norm import PreNorm
from attnflow.models.wiring.sums import find_projections
from attnflow.models.wiring.trace import Trace
from attnflow.models.wiring.wiring import BranchWiring, Miss, Observation, StreamParts
from tests.edges.odd_blocks import gate_stream, rewire
from tests.edges.parts import build_parts
from tests.families import build, count_hooks, perturb

IDS = [5, 6, 7, 8, 9, 10, 11]


# ---- the patterns that ship ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "pattern", "passed"),
    [
        ("llama", PreNorm, 0),
        ("gemma2", PreNorm, 1),  # a norm on the branch
        ("dinov2", PreNorm, 1),  # a factor per channel
        ("bert", PostNorm, 0),
        ("gpt-neox", Parallel, 0),
    ],
)
def test_each_way_to_add_a_branch_has_its_pattern(family: str, pattern: Any, passed: int) -> None:
    wirings = find_wirings(af.Model(perturb(family)))
    assert {type(wiring) for wiring in wirings} == {pattern}
    assert pattern in PATTERNS
    for wiring in wirings:
        assert len(wiring.passed) == passed  # type: ignore[attr-defined]
        assert wiring.taps[0] == wiring.residual
        assert len(set(wiring.taps)) == len(wiring.taps)
        assert wiring.block is not None
        assert wiring.attention.startswith(wiring.block)


# ---- a pattern from outside the package ---------------------------------------------------------


@dataclass(frozen=True)
class ScaledResidual(BranchWiring):
    """y = share * x + branch: no pattern that ships multiplies the residual."""

    share: float

    @classmethod
    def recognise(cls, trace: Trace, call: int) -> "ScaledResidual | Miss":
        events, calls = trace.events, trace.calls
        end = next((later for later in calls if later > call), len(events))
        for start in find_projections(trace, call):
            branch = events[start].state
            for later in events[start + 1 : end]:
                if later.tap is None or later.state.shape != branch.shape:
                    continue
                rest = later.state - branch
                for earlier in reversed(events[:call]):
                    if earlier.tap is None or earlier.state.shape != branch.shape:
                        continue
                    x = earlier.state
                    share = float((rest * x).sum() / (x * x).sum())
                    if float((rest - share * x).norm()) < 1e-4 * float(rest.norm()):
                        names = (events[call].module, earlier.tap, events[start].module)
                        return cls(*names, (), 1.0, later.tap, share)
        return Miss.NO_SUM

    def split_stream(self, observed: Observation) -> StreamParts:
        weights, projection, total = self.add_branch(observed)
        kept = self.share * observed.residual
        stream = observed.state(self.stream)
        parts = total - observed.residual + kept
        observed.check(parts, stream, parts, f"the stream after {self.attention}")
        return StreamParts(weights, projection, kept, stream)


@dataclass(frozen=True)
class WrongShare(ScaledResidual):
    """One that is off by a hundredth."""

    @classmethod
    def recognise(cls, trace: Trace, call: int) -> "ScaledResidual | Miss":
        found = super().recognise(trace, call)
        return found if isinstance(found, Miss) else replace(found, share=1.01 * found.share)


def test_a_pattern_from_outside_lets_in_a_block_that_is_refused_without_it() -> None:
    model = af.Model(rewire(gate_stream))  # its second block adds to 0.7 times the residual
    message = r"output of model\.layers\.1\.self_attn \(LlamaAttention\) to the residual stream was"
    for _ in range(2):  # and again, after it has been let in
        with pytest.raises(af.CaptureError, match=message):
            af.attention_graph(model, IDS, edges="contribution")
        with use_patterns(ScaledResidual):
            wirings = find_wirings(model)
            assert [type(wiring) for wiring in wirings] == [PreNorm, ScaledResidual, PreNorm]
            assert wirings[1].share == pytest.approx(0.7, abs=1e-5)  # type: ignore[attr-defined]
            for mix in af.capture_mix(model, IDS):
                whole = mix.stream.double().numpy()
                rest = np.abs(build_parts(mix).sum(axis=1) - whole).max()
                assert rest < 1e-5 * np.abs(whole).max()  # the projection has no bias


def test_every_kind_of_edges_builds_on_a_pattern_from_outside() -> None:
    model = af.Model(rewire(gate_stream))
    with use_patterns(ScaledResidual):
        assert [wiring.block for wiring in find_wirings(model)] == [
            f"model.layers.{number}" for number in range(3)
        ]
        for kind in ("norm", "contribution", "value_zeroing"):
            graph = af.attention_graph(model, IDS, edges=kind)
            np.testing.assert_allclose(graph.edges.sum(axis=-1), 1.0, atol=1e-6)
            if kind != "value_zeroing":
                rows = af.rollout_rows(model, IDS, positions=[-1], edges=kind)
                whole = af.rollout(graph, positions=[-1])
                np.testing.assert_allclose(rows.values[-1], whole.values[-1], atol=1e-5)


def test_a_pattern_that_is_wrong_is_an_error_that_names_the_layer() -> None:
    model = af.Model(rewire(gate_stream))
    message = r"the stream after model\.layers\.1\.self_attn was not understood: its parts miss"
    with use_patterns(WrongShare), pytest.raises(af.CaptureError, match=message):
        af.attention_graph(model, IDS, edges="contribution")


def test_patterns_that_ship_come_first() -> None:
    class Greedy(PreNorm):
        @classmethod
        def recognise(cls, trace: Trace, call: int) -> Any:
            raise AssertionError("a block that is known was shown to it")

    with use_patterns(Greedy):
        assert {type(wiring) for wiring in find_wirings(af.Model(build("bert")))} == {PostNorm}


# ---- threads ------------------------------------------------------------------------------------


def test_hooks_report_their_own_thread_with_or_without_keyword_arguments() -> None:
    module, seen = torch.nn.Linear(2, 2), list[Any]()

    def before(part: Any, given: Any, named: Any) -> None:
        seen.append((given, named))

    with watch_modules([module], before=before):
        (hook,) = module._forward_pre_hooks.values()
        hook(module, (1,))
        hook(module, (2,), {"mask": 3})
        other = threading.Thread(target=hook, args=(module, (4,)))
        other.start()
        other.join()
    assert seen == [((1,), {}), ((2,), {"mask": 3})]
    assert not module._forward_pre_hooks


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("family", ["gpt2", "gemma2"])  # a projection and norms that are copied
def test_edges_of_a_fresh_model_in_eight_threads_beside_plain_passes(family: str) -> None:
    inputs = [IDS, IDS[::-1], IDS[2:], IDS[:4], IDS[1:6], IDS[3:]]
    kinds = ["contribution", "gradient", "value_zeroing"] * 2
    original = perturb(family)
    expected = [
        af.attention_graph(original, ids, edges=kind).edges
        for ids, kind in zip(inputs, kinds, strict=True)
    ]
    ids = torch.tensor([IDS])
    with torch.no_grad():
        logits = original(input_ids=ids).logits
    for _ in range(3):
        model = deepcopy(original)  # not traced
        before = count_hooks(model)  # transformers leaves hooks where weights were asked for
        together, done = threading.Barrier(8), threading.Event()
        problems: list[BaseException] = []

        def explain(
            number: int, model: Any = model, together: Any = together, problems: Any = problems
        ) -> None:
            try:
                together.wait()
                graph = af.attention_graph(model, inputs[number], edges=kinds[number])
                np.testing.assert_allclose(graph.edges, expected[number], atol=1e-6)
            except BaseException as problem:
                problems.append(problem)

        def run_plainly(
            model: Any = model, together: Any = together, done: Any = done, problems: Any = problems
        ) -> None:
            try:
                together.wait()
                while not done.is_set():
                    with torch.no_grad():
                        assert torch.equal(model(input_ids=ids).logits, logits)
            except BaseException as problem:
                problems.append(problem)

        crew = [threading.Thread(target=explain, args=(number,)) for number in range(6)]
        beside = [threading.Thread(target=run_plainly) for _ in range(2)]
        for thread in (*crew, *beside):
            thread.start()
        for thread in crew:
            thread.join()
        done.set()
        for thread in beside:
            thread.join()
        if problems:
            raise problems[0]
        assert count_hooks(model) == before
