"""Fingerprints: the same model has the same one wherever it is, and training changes it."""

import copy
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t

import attnflow as af
from attnflow.models import fingerprint
from attnflow.models.fingerprint import model_fingerprint, quick_fingerprint
from attnflow.models.samples import list_tensors
from tests.families import FAMILIES, build, text, word_tokenizer


def make_bert(**options: Any) -> Any:
    torch.manual_seed(0)
    return t.BertForSequenceClassification(text(t.BertConfig, **options)()).eval()


def test_the_fingerprint_of_the_bundled_model_is_what_it_was() -> None:
    """Corpora name it in their manifests, and are resumed by it."""
    expected = "cf14dcf89f4d363014ab04b8f658a0d77dea08b1fa4ea4243f4a126755e4d17a"
    assert model_fingerprint(af.load()) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quick_fingerprint_is_16_digits_of_every_family(family: str) -> None:
    found = quick_fingerprint(af.Model(build(family)))
    name, digits = found.split("-")
    assert (name, len(digits)) == ("quick", 16)
    assert int(digits, 16) >= 0
    assert quick_fingerprint(af.Model(copy.deepcopy(build(family)))) == found


def test_a_whole_fingerprint_cannot_be_taken_for_a_quick_one() -> None:
    """Results have the quick one, corpora the whole one: neither begins with the other."""
    model = af.load()
    quick, whole = quick_fingerprint(model), model_fingerprint(model)
    assert quick.startswith("quick-")
    assert (len(whole), int(whole, 16) > 0) == (64, True)
    source = af.capture(model, "the key").source
    assert source is not None
    assert source.fingerprint == quick


def test_where_a_model_was_loaded_from_does_not_count(tmp_path: Path) -> None:
    model = af.Model(make_bert(), word_tokenizer())
    unsaved = quick_fingerprint(model)
    for name in ("here", "there"):
        model.model.save_pretrained(tmp_path / name)
        model.tokenizer.save_pretrained(tmp_path / name)
    here, there = (af.load(tmp_path / name) for name in ("here", "there"))
    assert quick_fingerprint(here) == unsaved
    assert (here.origin, there.origin) == ("here", "there")
    for take in (quick_fingerprint, model_fingerprint):
        assert take(here) == take(there)


def test_training_changes_it_and_going_back_does_too() -> None:
    # which transformers would write into the configuration at the first loss
    module = make_bert(problem_type="single_label_classification")
    model = af.Model(module)
    before, saved = quick_fingerprint(model), copy.deepcopy(module.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.tensor([[5, 6, 7]]), labels=torch.tensor([1])).loss.backward()
    optimizer.step()
    after = quick_fingerprint(model)
    assert after != before
    assert quick_fingerprint(model) == after
    module.load_state_dict(saved)
    assert quick_fingerprint(model) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.to(torch.float64),
        lambda module: setattr(module.classifier.bias, "data", torch.ones(2)),
        lambda module: setattr(module.config, "hidden_act", "relu"),
        lambda module: module.add_module("more", torch.nn.Linear(2, 2)),
        lambda module: setattr(module, "classifier", torch.nn.Linear(32, 2)),
    ],
    ids=["precision", "another tensor", "a setting", "a module", "a head"],
)
def test_what_makes_another_model_changes_it(change: Any) -> None:
    module = make_bert()
    before = quick_fingerprint(af.Model(module))
    change(module)
    assert quick_fingerprint(af.Model(module)) != before


def test_the_vocabulary_counts_but_not_how_it_was_used_last() -> None:
    tokenizer, module = word_tokenizer(), make_bert()
    bare, model = af.Model(module), af.Model(module, tokenizer)
    before = quick_fingerprint(model), model_fingerprint(model)
    assert quick_fingerprint(bare) != before[0]
    tokenizer(["the key", "the"], padding=True, truncation=True, max_length=3)
    assert tokenizer.backend_tokenizer.truncation is not None
    fingerprint.of_vocabularies.clear()
    assert (quick_fingerprint(model), model_fingerprint(model)) == before
    tokenizer.add_tokens(["zorb"])
    assert quick_fingerprint(model) != before[0]


def test_the_layout_of_memory_does_not_count() -> None:
    module = make_bert()
    before = quick_fingerprint(af.Model(module))
    weight = module.bert.encoder.layer[0].output.dense.weight
    weight.data = weight.data.T.contiguous().T
    assert not weight.is_contiguous()
    assert quick_fingerprint(af.Model(module)) == before


class Holder(torch.nn.Module):
    """A module of a user's own, with a buffer that is not saved and a tensor without data."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("bert")
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.register_buffer("shell", torch.empty(3, device="meta"))
        self.register_buffer("empty", torch.empty(0))


def test_a_module_that_holds_a_model_has_one_too() -> None:
    module = Holder()
    before = quick_fingerprint(af.Model(module))
    module.cache.fill_(1.0)
    assert quick_fingerprint(af.Model(module)) == before
    with torch.no_grad():
        weight = module.inner.embeddings.word_embeddings.weight
        weight.add_(1.0)
        assert quick_fingerprint(af.Model(module)) != before
        weight.sub_(1.0)


def test_odd_tokenizers_settings_and_tensors_are_no_error() -> None:
    class Words:
        __slots__ = ()

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [str(number) for number in ids]

    module = make_bert()
    quick_fingerprint(af.Model(module, Words()))
    with torch.inference_mode():
        module.classifier.weight = torch.nn.Parameter(torch.zeros(2, 32), requires_grad=False)
    first = quick_fingerprint(af.Model(module))
    with torch.inference_mode():
        module.classifier.weight.add_(1.0)
    assert quick_fingerprint(af.Model(module)) != first
    module.register_buffer("sparse", torch.eye(3).to_sparse())  # has neither a layout nor bytes
    assert quick_fingerprint(af.Model(module)).startswith(fingerprint.QUICK)
    assert fingerprint.read_settings(SimpleNamespace(layers=2, _name_or_path="x")) == (
        b'{"layers": 2}'
    )


def test_a_quick_fingerprint_is_quick() -> None:
    model = af.Model(t.BertModel(text(t.BertConfig, num_hidden_layers=20)()))
    assert len(dict(list_tensors(model.model))) > 300
    quick_fingerprint(model)
    began = time.thread_time()
    for _ in range(10):
        quick_fingerprint(model)
    assert time.thread_time() - began < 0.2  # 20 ms each; it takes 1 ms on an idle core


def test_threads_agree_on_it() -> None:
    module = make_bert()
    found: list[str] = []
    work = [
        threading.Thread(target=lambda: found.append(quick_fingerprint(af.Model(module))))
        for _ in range(8)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
