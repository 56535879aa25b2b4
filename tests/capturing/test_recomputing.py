"""Blocks that are recomputed in the backward pass give the same gradients, and leave no trace."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

import attnflow as af
from tests.families import VISION, build, make_input

FAMILIES = ["roberta", "gpt2", "llama", "gemma2", "gpt-oss", "t5", "bart", "vit"]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_where_blocks_are_computed_again(
    family: str, monkeypatch: Any
) -> None:
    model = deepcopy(build(family))  # others may have left gradients in it
    forwards = {name: part.forward for name, part in model.named_modules()}
    whole = af.attention_graph(model, make_input(family), edges="gradient").edges
    monkeypatch.setattr("attnflow.capturing.checkpointing.KEPT", 0)
    again = af.attention_graph(model, make_input(family), edges="gradient").edges
    np.testing.assert_allclose(again, whole, rtol=1e-5, atol=1e-6)
    assert forwards == {name: part.forward for name, part in model.named_modules()}
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["llama", "vit"])
def test_blocks_run_twice_then(family: str, monkeypatch: Any) -> None:
    model = build(family)
    layers = model.vit.layers if family in VISION else model.model.layers
    calls: list[int] = []
    part = layers[1].mlp
    with monkeypatch.context() as patch:  # where blocks are is found once
        patch.setattr("attnflow.capturing.checkpointing.KEPT", 0)
        af.attention_graph(model, make_input(family), edges="gradient")
    handle = part.register_forward_pre_hook(lambda *given: calls.append(1))
    try:
        af.attention_graph(model, make_input(family), edges="gradient")
        plain = len(calls)
        monkeypatch.setattr("attnflow.capturing.checkpointing.KEPT", 0)
        af.attention_graph(model, make_input(family), edges="gradient")
    finally:
        handle.remove()
    assert len(calls) - plain == plain + 1
