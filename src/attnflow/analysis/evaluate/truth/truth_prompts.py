"""`truth_prompts`: prompts whose true token is known, checked by running the model."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, overload

import numpy as np

from attnflow.analysis.evaluate.truth.families import (
    TRUTH_FAMILIES,
    Draft,
    TooFewWordsError,
)
from attnflow.analysis.importance.variant import Variant
from attnflow.analysis.importance.watch import run_variants
from attnflow.capturing.capture import find_source
from attnflow.core.checks import check_count
from attnflow.core.io.formatting import format_count
from attnflow.core.io.tables import Table
from attnflow.core.provenance import Source
from attnflow.errors import AttnFlowError, OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.progress import progress_bar

if TYPE_CHECKING:
    import torch

DRAFTS_TOGETHER = 32
TRIES = 40  # drafts per prompt that is wanted


@dataclass(frozen=True, eq=False)
class TruthPrompt:
    """A prompt whose answer comes from one known token.

    Parameters
    ----------
    family
        The kind of prompt.
    text, encoded
        The prompt, as a text and as the model takes it.
    answer, target
        The right next word, and its token id.
    foil, foil_target
        A wrong word that the prompt suggests, and its token id.
    value
        The position of the token that decides the answer.
    keys
        The positions of the tokens that select it; () where they are not known.
    """

    family: str
    text: str
    encoded: Encoded
    answer: str
    target: int
    foil: str
    foil_target: int
    value: int
    keys: tuple[int, ...] = ()

    @property
    def distance(self) -> int:
        """The tokens from the value to the last one."""
        return len(self.encoded.tokens) - 1 - self.value


class FunnelRow(NamedTuple):
    """How many prompts of a family passed each check."""

    family: str
    tried: int
    right: int
    flips: int
    calm: int
    keys: int


@dataclass(frozen=True, eq=False)
class TruthPrompts(Table, Sequence[TruthPrompt]):
    """Prompts with known truth, and the funnel that they passed; a table of that funnel.

    Columns: the family; the prompts tried; those that the model answers right; those of them whose
    answer follows two swaps of the value; and those that also keep it when all distractors change,
    which are the prompts. `keys` counts those whose keys are known as well.

    Parameters
    ----------
    prompts
        The prompts, by family.
    funnel
        One row per family.
    seed
        The seed they were drawn with.
    source
        The model that they were checked by.
    """

    columns: ClassVar = FunnelRow._fields

    prompts: tuple[TruthPrompt, ...]
    funnel: tuple[FunnelRow, ...]
    seed: int = 0
    source: Source | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, place: int) -> TruthPrompt: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[TruthPrompt, ...]: ...
    def __getitem__(self, place: int | slice) -> TruthPrompt | tuple[TruthPrompt, ...]:
        return self.prompts[place]

    def __repr__(self) -> str:
        families = len({prompt.family for prompt in self.prompts})
        return (
            f"<TruthPrompts: {format_count(len(self), 'prompt')} of"
            f" {families} {'family' if families == 1 else 'families'}>"
        )

    @property
    def foils(self) -> list[int]:
        """The token of each prompt's foil, as `evaluate` takes them: `foil=prompts.foils`."""
        return [prompt.foil_target for prompt in self.prompts]

    def rows(self) -> Iterator[FunnelRow]:
        """(family, tried, right, flips, calm, keys)."""
        yield from self.funnel

    def _content(self) -> dict[str, object]:
        prompts = [
            {
                "family": prompt.family,
                "text": prompt.text,
                "ids": prompt.encoded.ids,
                "answer": prompt.answer,
                "target": prompt.target,
                "foil": prompt.foil,
                "foil_target": prompt.foil_target,
                "value": prompt.value,
                "keys": prompt.keys,
            }
            for prompt in self.prompts
        ]
        return {"seed": self.seed, "prompts": prompts, **super()._content()}


def truth_prompts(
    model: ModelLike,
    *,
    families: Iterable[str] | str | None = None,
    count: int = 50,
    seed: int = 0,
    tries: int = TRIES,
) -> TruthPrompts:
    """Prompts for a causal language model whose true token is known.

    Templates are filled at random, and kept only if the model shows that one token decides: the
    answer is right (more probable than all other words of its pool), it follows two swaps of that
    token, and it stays when all distractors change at once. The places of values are drawn
    uniformly, so no order of positions is favoured.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model; a causal language
        model with a tokenizer.
    families
        The families to draw from; all if None: repeat, relatives, ioi, agreement, owners, needle,
        pairs, shots, passwords.
    count
        The number of prompts to keep, spread evenly over families; fewer if `tries` run out.
    seed
        Of the random draws.
    tries
        The most drafts per prompt that is wanted.

    >>> import attnflow as af
    >>> prompts = af.truth_prompts("path/of/a/causal-lm")  # doctest: +SKIP
    >>> prompts[0].text, prompts[0].answer, prompts[0].value  # doctest: +SKIP
    """
    chosen = read_families(families)
    count, tries = check_count("count", count), check_count("tries", tries)
    model = open_model(model)
    if model.task != "causal LM" or model.is_encoder_decoder or model.tokenizer is None:
        raise OptionError(
            "prompts with known truth are for causal language models with a tokenizer;"
            f" got {model.name} ({model.task})"
        )
    prompts: list[TruthPrompt] = []
    funnel = []
    with progress_bar("checking prompts") as tick:
        for number, family in enumerate(chosen):
            wanted = count // len(chosen) + (number < count % len(chosen))
            found = PromptSearch(model, family, seed).run(wanted, wanted * tries)
            prompts += found.kept
            funnel.append(found.row)
            tick(number + 1, len(chosen))
    if not prompts:
        raise OptionError(
            f"no prompt passed the checks: {model.name} answers none of them as its tokens decide;"
            " give more tries, or other families"
        )
    return TruthPrompts(tuple(prompts), tuple(funnel), seed, find_source(model))


def read_families(families: Iterable[str] | str | None) -> list[str]:
    """The families, checked; all if None."""
    if families is None:
        return list(TRUTH_FAMILIES)
    chosen = list(dict.fromkeys([families] if isinstance(families, str) else families))
    unknown = [name for name in chosen if name not in TRUTH_FAMILIES]
    if unknown or not chosen:
        got = repr(unknown[0]) if unknown else "none"
        raise OptionError(f"unknown family {got}; choose from {', '.join(TRUTH_FAMILIES)}")
    return chosen


# ---- words that are one token --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WordTokens:
    """Words and their tokens inside of a text."""

    model: Model
    ids: dict[str, int | None] = field(default_factory=dict)  # None: not one token

    def fit(self, words: Sequence[str]) -> list[str]:
        """Those of the words that are one token."""
        return [word for word in words if self.find(word) is not None]

    def find(self, word: str) -> int | None:
        """The token of a word after a space; None if it has several."""
        if word not in self.ids:
            before, after = (
                self.model.tokenizer(text, add_special_tokens=False)["input_ids"]
                for text in ("The", f"The {word}")
            )
            unknown = getattr(self.model.tokenizer, "unk_token_id", None)
            is_one = after[:-1] == before and after[-1] != unknown
            self.ids[word] = int(after[-1]) if is_one else None
        return self.ids[word]


def locate_slots(base: Encoded, other: Encoded, slots: Iterable[int]) -> dict[int, int] | None:
    """The position of each slot with another word; None unless just these positions differ."""
    if len(base.ids) != len(other.ids):
        return None
    differ = [
        place
        for place, pair in enumerate(zip(base.ids, other.ids, strict=True))
        if pair[0] != pair[1]
    ]
    changed = sorted(slots)  # slots are numbered from left to right
    return dict(zip(changed, differ, strict=True)) if len(changed) == len(differ) else None


# ---- the checks ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Candidate:
    """A draft as the model takes it, with its variants by kind, and the slots' positions."""

    draft: Draft
    encoded: Encoded
    variants: dict[str, list[tuple[Encoded, int]]]  # "swaps", ...: with the token of the answer
    places: dict[int, int]  # by slot
    target: int
    foil: int


@dataclass(eq=False)
class PromptSearch:
    """Draws drafts of a family and keeps those that pass all checks."""

    model: Model
    family: str
    seed: int
    kept: list[TruthPrompt] = field(default_factory=list)
    row: FunnelRow = field(init=False)

    def __post_init__(self) -> None:
        self.row = FunnelRow(self.family, 0, 0, 0, 0, 0)
        self.words = WordTokens(self.model)

    def run(self, wanted: int, tries: int) -> "PromptSearch":
        """Draw until enough prompts are kept, or `tries` drafts were drawn."""
        drawn = 0
        while len(self.kept) < wanted and drawn < tries:
            size = min(DRAFTS_TOGETHER, 2 * (wanted - len(self.kept)) + 2)
            together = range(drawn, min(drawn + size, tries))
            drawn = together.stop
            candidates = [found for each in together if (found := self.draw(each)) is not None]
            if not candidates and not self.row.tried:
                break  # the words of this family are no single tokens
            self.check(candidates, wanted)
        return self

    def draw(self, number: int) -> Candidate | None:
        """A draft by its number; None where words are not single tokens in this place."""
        place = list(TRUTH_FAMILIES).index(self.family)
        rng = np.random.default_rng([self.seed, place, number])
        try:
            draft = TRUTH_FAMILIES[self.family](self.family, rng, self.words.fit)
            encoded = self.model.encode(draft.write())
        except (TooFewWordsError, AttnFlowError):  # or longer than the model takes
            return None
        places: dict[int, int] = {}
        variants: dict[str, list[tuple[Encoded, int]]] = {}
        kinds = {"swaps": draft.swaps, "calms": draft.calms, "exchanges": draft.exchanges}
        for kind, rewordings in kinds.items():
            variants[kind] = []
            for rewording in rewordings:
                other = self.model.encode(draft.write(rewording.words))
                found = locate_slots(encoded, other, rewording.words)
                answer = self.words.find(rewording.answer)
                if found is None or answer is None:
                    return None
                places |= found
                variants[kind].append((other, answer))
        target, foil = self.words.find(draft.answer), self.words.find(draft.foil)
        if target is None or foil is None:
            return None
        return Candidate(draft, encoded, variants, places, target, foil)

    def check(self, candidates: Sequence[Candidate], wanted: int) -> None:
        """Run the checks one after another, on the drafts that passed those before."""
        passed = self.pass_each(candidates, [[(each.encoded, each.target)] for each in candidates])
        levels = dict.fromkeys(map(id, candidates), 0)
        for level, kind in enumerate(("right", "swaps", "calms", "exchanges"), start=1):
            if kind != "right":
                passed = self.pass_each(passed, [each.variants[kind] for each in passed])
            levels |= {id(each): level for each in passed}
        for candidate in candidates:
            if len(self.kept) == wanted:
                return
            self.count(candidate, levels[id(candidate)])

    def pass_each(
        self, candidates: Sequence[Candidate], inputs: Sequence[Sequence[tuple[Encoded, int]]]
    ) -> list[Candidate]:
        """The candidates whose inputs all have their answer as the best word of the pool."""
        if not candidates:
            return []
        pool = [self.words.find(word) for word in candidates[0].draft.pool]
        known = [number for number in pool if number is not None]
        best = iter(find_best(self.model, [one for each in inputs for one, _ in each], known))
        return [
            candidate
            for candidate, each in zip(candidates, inputs, strict=True)
            if [next(best) for _ in each] == [answer for _, answer in each]
        ]

    def count(self, candidate: Candidate, level: int) -> None:
        """Count a candidate by the number of checks that it passed, and keep it after three."""
        draft, row = candidate.draft, self.row
        has_keys = level == 4 and bool(draft.exchanges)
        self.row = FunnelRow(
            self.family,
            row.tried + 1,
            row.right + (level >= 1),
            row.flips + (level >= 2),
            row.calm + (level >= 3),
            row.keys + has_keys,
        )
        if level < 3:
            return
        self.kept.append(
            TruthPrompt(
                self.family,
                draft.write(),
                candidate.encoded,
                draft.answer,
                candidate.target,
                draft.foil,
                candidate.foil,
                candidate.places[draft.value],
                tuple(candidate.places[slot] for slot in draft.keys) if has_keys else (),
            )
        )


def find_best(model: Model, inputs: Sequence[Encoded], pool: Sequence[int]) -> list[int]:
    """The most probable token of a pool after each input."""

    def read(logits: "torch.Tensor", chosen: Sequence[Variant]) -> list[int]:
        return [pool[place] for place in logits[:, list(pool)].argmax(dim=-1).tolist()]

    variants = [Variant(encoded, model.logit_position(encoded), None) for encoded in inputs]
    return run_variants(model, variants, read, None)
