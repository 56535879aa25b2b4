"""What is known of a model is forgotten when its weights or its parts change, and only then."""

import random
from copy import deepcopy

import pytest
import torch

import attnflow as af
from attnflow.models import execution
from attnflow.models.samples import sample_state
from tests.families import build
from tests.hostile.trained import CHANGES, IDS, put_gate


@pytest.mark.parametrize("change", CHANGES)
def test_a_gate_that_is_opened_after_probing_is_noticed(change: str) -> None:
    module = deepcopy(build("llama"))
    gated = put_gate(module, random.Random(0))
    model = af.Model(module)
    af.attention_graph(model, IDS, edges="contribution")
    CHANGES[change](module, gated)
    with pytest.raises(af.CaptureError):
        af.attention_graph(af.Model(deepcopy(module)), IDS, edges="contribution")
    with pytest.raises(af.CaptureError):
        af.attention_graph(model, IDS, edges="contribution")


def test_a_part_that_is_replaced_is_noticed() -> None:
    module = deepcopy(build("llama"))
    before = sample_state(module)
    module.model.layers[0].mlp.act_fn = torch.nn.Identity()
    assert sample_state(module) != before


@pytest.mark.parametrize("width", [32, 4096])
@pytest.mark.parametrize("place", [1, -2])
def test_one_value_of_many_is_noticed(width: int, place: int) -> None:
    module = torch.nn.Linear(width, 2)
    before = sample_state(module)
    assert sample_state(module) == before
    with torch.no_grad():
        module.weight[1, place] += 1.0
    written = sample_state(module)
    assert written != before
    if width == 32:
        module.weight.data[1, place] -= 1.0
        assert sample_state(module) != written


def test_an_unchanged_model_is_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    get = execution.ModuleCache.get

    def count(self, module, key, compute):  # type: ignore[no-untyped-def]
        def noted():  # type: ignore[no-untyped-def]
            computed.append(key)
            return compute()

        return get(self, module, key, noted)

    monkeypatch.setattr(execution.ModuleCache, "get", count)
    model = af.Model(deepcopy(build("llama")))
    af.attention_graph(model, IDS, edges="contribution")
    first = len(computed)
    assert first > 0
    with torch.inference_mode():
        af.attention_graph(af.Model(model.model), IDS, edges="contribution")
    af.generate(model, IDS, max_new_tokens=2, eos_token_id=None)
    af.attention_graph(model, IDS, edges="gradient")
    assert len(computed) == first
