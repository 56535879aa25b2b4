"""Train the model that ships with attnflow: from sentences to weights, vocabulary and card."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow.core.checks import is_integer
from attnflow.core.io.files import dump_json, write_file
from attnflow.errors import FileError, OptionError
from attnflow.models.bundled.verb_number import (
    LABELS,
    SPECIAL,
    VerbNumber,
    VerbNumberConfig,
    Vocabulary,
    save_verb_number,
)
from attnflow.models.encoded import pad_ids
from attnflow.paper.agreement import Sentence, read_agreement
from attnflow.paper.augmentation import stream_sentences
from attnflow.paper.cards import Tally, format_card, format_command
from attnflow.paper.checkpoint import claim_folder, digest
from attnflow.paper.nouns import Lexicon, build_lexicon
from attnflow.paper.recipes import CAREFUL, Recipe
from attnflow.paper.training import Optimiser, TellLine, TrainingTask, run_training

MIN_COUNT = 2  # occurrences on the train side of a word in the vocabulary
VERB_POOL = 40  # batches whose sentences are sorted by length together, to reduce padding
VERB_EVALUATION_BATCH = 256  # sentences per batch without gradients
MAX_SEED = 2**32

Pool = list[list[tuple[list[int], int]]]  # batches of token ids with their label


@dataclass(frozen=True)
class VerbNumberResult:
    """A trained model: where it is, and how often it is right on the test side."""

    folder: Path
    test: dict[str, Tally]  # by file, and "natural" and "attractors" over all files
    steps: int
    seconds: float


def train_verb_number(
    data: Iterable[Path],
    out: Path,
    *,
    recipe: Recipe = CAREFUL,
    seed: int = 0,
    size: VerbNumberConfig | None = None,
    resume: bool = False,
    report: TellLine | None = None,
) -> VerbNumberResult:
    """Train on the train side of the data, and write the model to `out`.

    The weights are chosen by the dev side and measured once on the test side. size: a
    configuration other than the paper's; the vocabulary always comes from the data.
    """
    paths = list(data)
    check_seed(seed)
    sides = split_sides(read_agreement(paths))
    claim_folder(
        out, resume
    )  # repeated in `run_training`; checked here before the rest is computed
    vocabulary, lexicon = build_vocabulary(sides["train"]), build_lexicon(sides["train"])
    model = make_model(vocabulary, lexicon, recipe, seed, size)
    task = make_verb_task(model, vocabulary, lexicon, sides, recipe, seed)
    tallies: dict[str, Tally] = {}

    def save(module: nn.Module) -> None:
        module.half().float()  # what is measured is what is written
        tallies.update(count_right(model, vocabulary, sides["test"]))
        sizes = {name: len(side) for name, side in sides.items()}
        command = format_command(paths, out, seed, recipe)
        card = format_card(tallies, sizes, len(vocabulary), seed, recipe, command)
        write_file(out / "README.md", lambda file: file.write(card.encode()))
        save_verb_number(model, vocabulary, out)

    outcome = run_training(task, out, seed=seed, resume=resume, save=save, report=report)
    return VerbNumberResult(out, tallies, outcome.steps, outcome.seconds)


def split_sides(sentences: Iterable[Sentence]) -> dict[str, list[Sentence]]:
    """The sentences by side; none longer than the model takes, none twice on the train side."""
    max_words = VerbNumberConfig(0).max_position_embeddings - 1
    sides: dict[str, list[Sentence]] = {"train": [], "dev": [], "test": []}
    for sentence in sentences:
        if len(sentence.words) <= max_words:
            sides[sentence.side].append(sentence)
    sides["train"] = list(dict.fromkeys(sides["train"]))
    for name, side in sides.items():
        if not side:
            raise FileError(
                f"the data has no sentence on the {name} side of the split "
                "(by their first four words); give more of it"
            )
    return sides


def build_vocabulary(sentences: Iterable[Sentence]) -> Vocabulary:
    """The words that occur often enough, the most frequent first."""
    count = Counter(word for sentence in sentences for word in sentence.words)
    order = sorted(count.items(), key=lambda item: (-item[1], item[0]))
    return Vocabulary(
        [*SPECIAL, *(word for word, times in order if times >= MIN_COUNT and word not in SPECIAL)]
    )


def make_model(
    vocabulary: Vocabulary,
    lexicon: Lexicon,
    recipe: Recipe,
    seed: int,
    size: VerbNumberConfig | None,
) -> VerbNumber:
    """A new model; `recipe` says how wide its weights start, and what embeddings share."""
    options = (
        {}
        if size is None
        else {name: value for name, value in asdict(size).items() if name != "vocab_size"}
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = VerbNumber(VerbNumberConfig(len(vocabulary), **options))
        if recipe.shared:
            share_embeddings(model, vocabulary, lexicon)
        model.token_embedding.weight *= recipe.embedding
        model.position_embedding.weight *= recipe.position
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight *= recipe.linear
    for block in model.blocks:
        block.attention.dropout.p = recipe.attention_dropout
    return model


def share_embeddings(model: VerbNumber, vocabulary: Vocabulary, lexicon: Lexicon) -> None:
    """Add to each embedding a part that all words of the same ending, number or noun have."""
    common: dict[str, Tensor] = defaultdict(lambda: torch.randn(model.config.hidden_size) * 0.02)
    for place, word in enumerate(vocabulary.words[len(SPECIAL) :], start=len(SPECIAL)):
        forms = [f"-{word[-end:]}" for end in (1, 2, 3) if word.islower() and len(word) > end + 1]
        if word in lexicon.number:
            lemma = min(word, lexicon.other[word]) if lexicon.is_paired(word) else word
            forms += [f"number {lexicon.number[word]}", f"noun {lemma}"]
        for form in forms:
            model.token_embedding.weight[place] += common[form]


def check_seed(seed: int) -> None:
    """Refuse anything but a seed in the range of torch."""
    if not is_integer(seed) or not 0 <= seed < MAX_SEED:
        raise OptionError(f"seed must be a whole number from 0 to {MAX_SEED - 1}; got {seed!r}")


# ---- the task ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The input of one training step."""

    ids: Tensor  # [sentence, position]
    mask: Tensor  # [sentence, position]
    labels: Tensor  # [sentence]
    truth: Tensor  # [sentence, position]: the true id where a word is blanked out, else -100


class Batches:
    """The batch of each step, the same for the same seed; made once if steps are taken in order."""

    def __init__(
        self,
        sentences: Sequence[Sentence],
        vocabulary: Vocabulary,
        lexicon: Lexicon,
        recipe: Recipe,
        seed: int,
    ) -> None:
        self.sentences, self.vocabulary, self.lexicon = sentences, vocabulary, lexicon
        self.recipe, self.seed = recipe, seed
        self.pools: Iterator[Pool] = iter(())
        self.pool: Pool = []
        self.next = 0  # the number of the next pool

    def __call__(self, step: int) -> Batch:
        """The batch of a step; all before it are drawn too, from the start for an earlier step."""
        wanted = step // VERB_POOL
        if wanted < self.next - 1 or self.next == 0:
            self.pools, self.next = self.make_pools(), 0
        while self.next <= wanted:
            self.pool = next(self.pools)
            self.next += 1
        rows = self.pool[step % VERB_POOL]
        ids, mask = pad_ids(
            [[self.vocabulary.cls_token_id, *row] for row, _ in rows], self.vocabulary.pad_token_id
        )
        noise = torch.rand(
            ids.shape, generator=torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        )
        blanked = (noise < self.recipe.blank) & (ids >= len(SPECIAL))
        labels = torch.tensor([label for _, label in rows])
        return Batch(
            ids.masked_fill(blanked, self.vocabulary.unk_token_id),
            mask,
            labels,
            torch.where(blanked, ids, -100),
        )

    def make_pools(self) -> Iterator[Pool]:
        """Pools of batches without end."""
        chance, size = random.Random(self.seed), self.recipe.batch
        stream = stream_sentences(self.sentences, self.lexicon, self.recipe.mixture, chance)
        while True:
            drawn = [
                (self.encode(sentence, chance), LABELS.index(sentence.label))
                for sentence in islice(stream, size * VERB_POOL)
            ]
            drawn.sort(key=lambda row: len(row[0]))
            pool = [drawn[start : start + size] for start in range(0, len(drawn), size)]
            chance.shuffle(pool)
            yield pool

    def encode(self, sentence: Sentence, chance: random.Random) -> list[int]:
        """The ids of a sentence, cut to what the model takes, with some nouns as their tag."""
        number = self.lexicon.number
        max_words = VerbNumberConfig(0).max_position_embeddings - 1
        words = [
            ("NN", "NNS")[number[word]]
            if word in number and chance.random() < self.recipe.tag
            else word
            for word in sentence.words
        ]
        return self.vocabulary.ids_of(words[-max_words:])


def make_verb_task(
    model: VerbNumber,
    vocabulary: Vocabulary,
    lexicon: Lexicon,
    sides: Mapping[str, Sequence[Sentence]],
    recipe: Recipe,
    seed: int,
) -> TrainingTask[Batch]:
    """What the training loop needs."""

    def measure() -> float:
        """The mean of the accuracies on natural sentences and on those with attractors, if any."""
        tallies = count_right(model, vocabulary, sides["dev"])
        known = [tallies[name].accuracy for name in ("natural", "attractors") if name in tallies]
        return sum(known) / len(known)

    return TrainingTask(
        module=model,
        steps=recipe.steps,
        batch_at=Batches(sides["train"], vocabulary, lexicon, recipe, seed),
        loss=lambda batch: compute_loss(model, batch, recipe),
        measure=measure,
        every=max(1, min(500, recipe.steps // 4)),
        optimiser=Optimiser(
            learning_rate=recipe.rate,
            weight_decay=recipe.decay,
            warm_up=recipe.warm_up,
            decay="cosine",
            fall=recipe.fall,
            inertia=0.98,
        ),
        average=recipe.average,
        title=f"recipe {recipe.name}, seed {seed}: {dump_json(asdict(recipe))}",
        options={
            "recipe": recipe.name,
            "options": digest(asdict(recipe)),
            "data": digest([sentence.text for sentence in sides["train"]]),
        },
    )


def compute_loss(model: VerbNumber, batch: Batch, recipe: Recipe) -> Tensor:
    """Cross-entropy of the label, and of blanked words, which the embeddings themselves score."""
    with torch.autocast("cpu", torch.bfloat16):
        states, _ = model.states(batch.ids, batch.mask)
        loss = functional.cross_entropy(
            model.classifier(states[:, 0]).float(), batch.labels, label_smoothing=recipe.smoothing
        )
        blanked = batch.truth >= 0
        if recipe.blank_loss and blanked.any():
            # [blanked word, word of the vocabulary]
            scores = states[blanked] @ model.token_embedding.weight.T
            loss = loss + recipe.blank_loss * functional.cross_entropy(
                scores.float(), batch.truth[blanked]
            )
    return loss


# ---- measuring -----------------------------------------------------------------------------------


def count_right(
    model: VerbNumber, vocabulary: Vocabulary, sentences: Sequence[Sentence]
) -> dict[str, Tally]:
    """How often the model is right, by group of sentences.

    The groups are files, sentences with counted attractors (by their number, and together), and
    natural sentences, which are the rest.
    """
    model.eval()
    rows = [[vocabulary.cls_token_id, *vocabulary.ids_of(sentence.words)] for sentence in sentences]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    right: dict[int, bool] = {}
    for start in range(0, len(order), VERB_EVALUATION_BATCH):
        chosen = order[start : start + VERB_EVALUATION_BATCH]
        ids, mask = pad_ids([rows[place] for place in chosen], vocabulary.pad_token_id)
        with torch.no_grad():
            predicted = model(ids, mask).logits.argmax(dim=-1).tolist()
        right |= {
            place: LABELS[label] == sentences[place].label
            for place, label in zip(chosen, predicted, strict=True)
        }
    members: dict[str, list[int]] = defaultdict(list)
    for place, sentence in enumerate(sentences):
        source, attractors = sentence.source, sentence.attractors
        members["attractors" if attractors else "natural"].append(place)
        members[source].append(place)
        if attractors and not source.endswith(f".{attractors}"):
            members[f"{source}, {attractors} attractors"].append(place)
    return {
        name: Tally(len(places), sum(right[place] for place in places))
        for name, places in sorted(members.items())
    }
