"""Variants that share a prefix against whole passes, for every kind of decoder; and the way back."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.analysis.importance import watch
from attnflow.analysis.importance.shared_prefix import run_shared, split_family
from tests.families import DECODERS, build

SIZE = 32
TOLERANCE = 1e-5
SINGLE = ("Bloom", "Gemma2", "GptOss")  # that fail in float64, or on a hidden first token there
IDS = [2, *torch.randint(4, 60, (SIZE - 1,), generator=torch.Generator().manual_seed(0)).tolist()]


def strengthen(model: Any) -> Any:
    """A copy with larger weights, so that every token matters; in float64 where that works."""
    model = deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2.0)
    return model if type(model).__name__.startswith(SINGLE) else model.double()


def count_shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the number of variants in each shared batch is added."""
    counts: list[int] = []

    def counting(*given: Any) -> Iterator[tuple[list[int], torch.Tensor]]:
        for places, logits in run_shared(*given):
            counts.append(len(places))
            yield places, logits

    monkeypatch.setattr(watch, "run_shared", counting)
    return counts


def run_whole(model: Any, token: int | None, at: int, groups: Sequence[Sequence[int]]) -> Any:
    """[variant, class]: logits of whole passes, the unchanged input last."""
    ids = torch.tensor([IDS] * (len(groups) + 1))
    mask = torch.ones_like(ids)
    for row, group in enumerate(groups):
        changed = mask if token is None else ids
        changed[row, list(group)] = token or 0
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).logits[:, at].double()


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize(("token", "position"), [(None, None), (7, None), (None, 20), (7, 20)])
def test_blank_out_with_a_shared_prefix_equals_whole_passes(
    name: str, token: int | None, position: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counts = strengthen(build(name)), count_shared(monkeypatch)
    several = [[3, 9], [15, 16, 17], [24, 4]]
    alone = set(range(SIZE)) - {place for group in several for place in group}
    groups = [*([place] for place in sorted(alone)), *several]
    found = af.blank_out(
        af.Model(model),
        IDS,
        replacement="attention" if token is None else token,
        position=position,
        groups=groups,
        signed=True,
    )
    assert sum(counts) > SIZE / 2
    logits = run_whole(model, token, SIZE - 1 if position is None else position, groups)
    chances = logits.softmax(-1)
    target = int(chances[-1].argmax())
    drops = chances[-1, target] - chances[:-1, target]
    np.testing.assert_allclose(found.values, drops.numpy(), atol=TOLERANCE)


def test_faithfulness_shares_prefixes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = af.Model(strengthen(build("llama"))), count_shared(monkeypatch)
    options: dict[str, Any] = {"metrics": ["deletion", "insertion"], "replacement": "attention"}
    found = af.faithfulness(model, IDS, np.arange(SIZE), **options)  # later tokens first
    assert sum(counts) > SIZE / 4
    monkeypatch.setattr(watch, "run_shared", lambda *_: iter(()))
    for metric, value in af.faithfulness(model, IDS, np.arange(SIZE), **options).items():
        assert found[metric] == pytest.approx(value, abs=TOLERANCE)


@pytest.mark.parametrize("fault", ["mask", "nothing", "refuses"])
def test_a_cache_that_does_not_allow_it_is_not_believed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = strengthen(build("llama"))
    expected = run_whole(model, None, SIZE - 1, [[place] for place in range(SIZE)]).softmax(-1)
    forward = type(model).forward

    def broken(self: Any, attention_mask: Any, past_key_values: Any = None, **given: Any) -> Any:
        if past_key_values is not None and fault == "refuses":
            raise ValueError("no cache here")
        if past_key_values is not None and fault == "mask":  # hidden positions are seen
            attention_mask = torch.ones_like(attention_mask)
        if fault == "nothing":
            past_key_values = None
        return forward(
            self, attention_mask=attention_mask, past_key_values=past_key_values, **given
        )

    def takes(
        self: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **given: Any,
    ) -> Any:
        return broken(self, attention_mask, past_key_values, input_ids=input_ids, **given)

    monkeypatch.setattr(type(model), "forward", takes)
    counts = count_shared(monkeypatch)
    with pytest.warns(UserWarning, match="every variant of an input runs whole, which takes long"):
        found = af.blank_out(af.Model(model), IDS, replacement="attention", signed=True)
    assert counts == []
    target = int(expected[-1].argmax())
    drops = (expected[-1, target] - expected[:-1, target]).numpy()
    np.testing.assert_allclose(found.values, drops, atol=TOLERANCE)


@pytest.mark.parametrize(("length", "tokens"), [(40, 64), (600, 1024), (3000, 1024)])
def test_batches_hold_every_variant_once_and_few_tokens_too_many(length: int, tokens: int) -> None:
    family = [(start, start + 5) for start in range(length // 8, length)]
    batches = list(split_family(family, length, tokens))
    assert [place for _, places in batches for place in places] == [place for _, place in family]
    run = sum((length - start) * len(places) for start, places in batches)
    assert all((length - start) * len(places) <= max(tokens, length) for start, places in batches)
    assert all(len(places) * length <= max(16 * tokens, length) for _, places in batches)
    assert run <= 1.3 * sum(length - start for start, _ in family) + 256 * len(batches) / 2
