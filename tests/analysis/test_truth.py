"""Prompts with known truth: models that follow a simple rule, and ranks by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import attnflow as af
from attnflow.analysis.evaluate.truth.families import TRUTH_FAMILIES
from attnflow.analysis.evaluate.truth.ranks import average_families, rank_truth

PIECES = r"'s|\w+|[^\s\w]"
COPIED = ["repeat", "relatives", "needle", "pairs", "shots", "passwords"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word and mark, for every word of every template."""
    rng = np.random.default_rng(0)
    drafts = [TRUTH_FAMILIES[name](name, rng, list) for name in TRUTH_FAMILIES for _ in range(300)]
    splitter = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    cut = pre_tokenizers.Sequence([splitter, pre_tokenizers.Split(Regex(PIECES), "isolated")])
    words = {"<unk>": 0, "The": 1}
    for draft in drafts:
        texts = [draft.write(), *(f"The {word}" for word in draft.pool)]
        for text in texts:
            for piece, _ in cut.pre_tokenize_str(text):
                words.setdefault(piece, len(words))
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = cut
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


class Rule(GPT2LMHeadModel):
    """A language model whose next token follows a rule of the tokens before it."""

    def __init__(self, rule: str, size: int) -> None:
        super().__init__(
            GPT2Config(vocab_size=size, n_embd=8, n_layer=1, n_head=2, n_positions=512)
        )
        self.rule = rule

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **options: Any) -> Any:
        logits = torch.zeros(*input_ids.shape, self.config.vocab_size)
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask, strict=True)):
            known = ids[: int(mask.sum())].tolist()
            logits[row, len(known) - 1, self.choose(known)] = 5.0
        return SimpleNamespace(logits=logits)

    def choose(self, ids: list[int]) -> int:
        """The next token: a copy of what followed the longest earlier match, or the latest entry's value."""
        if self.rule == "constant":
            return 7
        if self.rule == "copy":
            sizes = range(len(ids) - 1, 0, -1)
            return next(
                ids[start + size]
                for size in sizes
                for start in range(len(ids) - size)
                if ids[start : start + size] == ids[-size:]
            )
        return ids[max(place for place, number in enumerate(ids[:-1]) if number == self.end) - 1]

    end = 0


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def make_model(rule: str, tokenizer: PreTrainedTokenizerFast) -> af.Model:
    return af.Model(Rule(rule, len(tokenizer)), tokenizer, task="causal LM")


def test_a_model_that_copies_keeps_every_prompt_and_its_keys(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = make_model("copy", tokenizer)
    prompts = af.truth_prompts(model, families=COPIED, count=24, seed=3)
    assert len(prompts) == 24
    assert {row.family: row.calm for row in prompts.rows()} == dict.fromkeys(COPIED, 4)
    for row in prompts.rows():
        assert row.tried == row.right == row.flips == row.calm  # it never errs
        assert row.keys == (0 if row.family == "repeat" else 4)
    for prompt in prompts:
        tokens = prompt.encoded.tokens
        assert tokens[prompt.value] == prompt.answer != prompt.foil
        assert prompt.foil in tokens
        assert prompt.target == prompt.encoded.ids[prompt.value]
        assert prompt.distance == len(tokens) - 1 - prompt.value
        if prompt.keys:  # the key of the entry, and that of the query
            entry, query = (tokens[place] for place in prompt.keys)
            assert entry == query
            assert min(prompt.keys) != max(prompt.keys)


def test_a_model_that_repeats_the_latest_value_has_no_keys(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    model = make_model("latest", tokenizer)
    model.model.end = tokenizer.get_vocab()["."]
    prompts = af.truth_prompts(model, families="passwords", count=8, seed=1, tries=20)
    (row,) = prompts.rows()
    assert 0 < row.flips < row.tried  # right where the last entry is asked for
    assert row.keys == 0
    assert {prompt.keys for prompt in prompts} == {()}


def test_values_stand_anywhere(tokenizer: PreTrainedTokenizerFast) -> None:
    model = make_model("copy", tokenizer)
    prompts = af.truth_prompts(model, families="shots", count=300, seed=0)
    places, sizes = [], []
    for prompt in prompts:
        values = [
            place + 2
            for place, token in enumerate(prompt.encoded.tokens[:-2])
            if token == "Output" and prompt.encoded.tokens[place + 1] == ":"
        ]
        places.append(values.index(prompt.value))
        sizes.append(len(values))
    for size in set(sizes):
        counts = np.bincount(
            [place for place, each in zip(places, sizes, strict=True) if each == size],
            minlength=size,
        )
        even = counts.sum() / size
        assert ((counts - even) ** 2 / even).sum() < 20  # chi-square, at most 5 degrees of freedom


def test_the_same_seed_gives_the_same_prompts_and_saves_them(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Any
) -> None:
    model = make_model("copy", tokenizer)
    one, same, other = (
        [prompt.text for prompt in af.truth_prompts(model, count=12, seed=seed, families=COPIED)]
        for seed in (0, 0, 1)
    )
    assert one == same != other
    prompts = af.truth_prompts(model, count=12, families=COPIED)
    assert repr(prompts) == "<TruthPrompts: 12 prompts of 6 families>"
    path = prompts.save(tmp_path / "prompts.json")
    assert prompts[0].answer in path.read_text()


def test_a_model_that_never_follows_is_told(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(af.OptionError, match="no prompt passed the checks"):
        af.truth_prompts(make_model("constant", tokenizer), count=3, tries=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"families": "sonnets"}, "unknown family 'sonnets'; choose from repeat, relatives"),
        ({"families": []}, "unknown family none"),
        ({"count": 0}, "count must be"),
        ({"tries": 0}, "tries must be"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(af.OptionError, match=message):
        af.truth_prompts("verb-number", **options)


def test_other_models_are_refused() -> None:
    with pytest.raises(af.OptionError, match="are for causal language models with a tokenizer"):
        af.truth_prompts("verb-number")


# ---- ranks --------------------------------------------------------------------------------------


def test_ties_share_their_mean_rank() -> None:
    scores = np.array([0.0, 0.4, 0.4, 0.4, 0.1, 0.0])
    ranked = np.arange(1, 5)
    assert rank_truth(scores, ranked, value=2)[:2] == (0.5, 0.0)
    assert rank_truth(scores + np.eye(6)[2], ranked, value=2)[:2] == (1.0, 1.0)


def test_average_precision_is_that_of_scikit_learn_without_ties() -> None:
    from scipy.stats import rankdata

    rng = np.random.default_rng(0)
    for _ in range(50):
        scores = rng.permutation(12).astype(float)
        value, *keys = rng.permutation(np.arange(1, 11))[:3].tolist()
        found = rank_truth(scores, np.arange(1, 11), value, keys).precision
        order = np.argsort(-scores[1:11]) + 1
        relevant = np.isin(order, [value, *keys])
        expected = (np.cumsum(relevant) / np.arange(1, 11))[relevant].mean()
        assert found == pytest.approx(expected)
        assert rankdata(-scores[1:11])[value - 1] == pytest.approx(
            1 / rank_truth(scores, np.arange(1, 11), value).reciprocal
        )


def test_families_weigh_equally_and_are_resampled_apart() -> None:
    values = np.array([1.0] * 9 + [0.0, 0.0, 1.0, np.nan])
    families = ["many"] * 9 + ["few"] * 4
    found = average_families(values, families)
    assert found.mean == pytest.approx((1 + 1 / 3) / 2)
    assert 0.5 <= found.low < found.mean < found.high <= 1.0
    assert found.prompts == 12
