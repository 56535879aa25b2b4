"""Train the model that ships with attnflow: from files of sentences to weights, vocabulary and model card."""

import random
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from attnflow.core.files import write_file
from attnflow.errors import FileError
from attnflow.models.inputs import pad_ids
from attnflow.models.verb_number import (
    LABELS,
    SPECIAL,
    VerbNumber,
    VerbNumberConfig,
    Vocabulary,
    save_verb_number,
)
from attnflow.paper.agreement import Sentence, read_agreement
from attnflow.paper.augmentation import Mixture, training_stream
from attnflow.paper.checkpoint import claim, digest
from attnflow.paper.nouns import Lexicon, build_lexicon
from attnflow.paper.training import Optimiser, Report, Task, train

LEAST = 2  # times that a word must come on the train side to be in the vocabulary
POOL = 40  # batches whose sentences are sorted by length together, so that little is padding
MEASURED = 256  # sentences at a time when nothing is learned


@dataclass(frozen=True)
class Recipe:
    """What can be chosen."""

    steps: int = 7400
    batch: int = 64
    rate: float = 1.5e-3
    warm_up: float = 0.04
    fall: float = 0.4  # the share of the steps, at the end, over which the rate falls
    decay: float = 0.05
    average: float = 0.998
    smoothing: float = 0.05  # of labels
    blank: float = (
        0.07  # words that become UNK, and are to be guessed: so UNK is nothing foreign to the model
    )
    blank_loss: float = 0.3
    tag: float = 0.05  # nouns that become NN or NNS, as the data writes rare ones
    embedding: float = 4.0  # how much wider than usual weights begin
    position: float = 2.0
    linear: float = 3.0


@dataclass(frozen=True)
class Group:
    """How often the model is right about some sentences."""

    count: int
    right: int

    @property
    def accuracy(self) -> float:
        """The share that is right."""
        return self.right / self.count if self.count else float("nan")


@dataclass(frozen=True)
class Result:
    """A trained model: where it is, and how often it is right on the test side."""

    folder: Path
    test: dict[str, Group]  # by file, and "natural" and "attractors" over all files
    steps: int
    seconds: float


def train_verb_number(
    data: Iterable[Path],
    out: Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    size: VerbNumberConfig | None = None,
    resume: bool = False,
    report: Report | None = None,
) -> Result:
    """Train on the train side of the data, choose by the dev side, measure once on the test side, write the model to `out`.

    size: another than the paper's; its vocabulary is that of the data all the same.
    """
    paths = list(data)
    sides = split(read_agreement(paths))
    claim(out, resume)  # again in `train`; here it spares the rest
    recipe = Recipe() if steps is None else Recipe(steps=steps)
    vocabulary, lexicon = build_vocabulary(sides["train"]), build_lexicon(sides["train"])
    model = new_model(vocabulary, lexicon, recipe, seed, size)
    task = task_of(model, vocabulary, lexicon, sides, recipe, seed)
    found: dict[str, Group] = {}

    def save(module: nn.Module) -> None:
        module.half().float()  # what is measured is what is written
        found.update(groups_of(model, vocabulary, sides["test"]))
        command = command_of(paths, out, seed, steps)
        text = card(
            found,
            {name: len(each) for name, each in sides.items()},
            vocabulary,
            seed,
            recipe,
            command,
        )
        write_file(out / "README.md", lambda file: file.write(text.encode()))
        save_verb_number(model, vocabulary, out)

    outcome = train(task, out, seed=seed, resume=resume, save=save, report=report)
    return Result(out, found, outcome.steps, outcome.seconds)


def split(sentences: Iterable[Sentence]) -> dict[str, list[Sentence]]:
    """The sentences by side; copies are left out of the train side, and so is what is longer than the model."""
    longest = VerbNumberConfig(0).max_position_embeddings - 1
    sides: dict[str, list[Sentence]] = {"train": [], "dev": [], "test": []}
    for each in sentences:
        if len(each.words) <= longest:
            sides[each.side].append(each)
    sides["train"] = list(dict.fromkeys(sides["train"]))
    for name, found in sides.items():
        if not found:
            raise FileError(
                f"the data has no sentence on the {name} side of the split (by their first four words); give more of it"
            )
    return sides


def build_vocabulary(sentences: Iterable[Sentence]) -> Vocabulary:
    """The words that come often enough, the most frequent first."""
    count = Counter(word for sentence in sentences for word in sentence.words)
    order = sorted(count.items(), key=lambda item: (-item[1], item[0]))
    return Vocabulary(
        [*SPECIAL, *(word for word, times in order if times >= LEAST and word not in SPECIAL)]
    )


def new_model(
    vocabulary: Vocabulary,
    lexicon: Lexicon,
    recipe: Recipe,
    seed: int,
    size: VerbNumberConfig | None,
) -> VerbNumber:
    """A model whose words of one ending, one number or one noun begin with a common part in their embeddings."""
    options = (
        {}
        if size is None
        else {name: value for name, value in asdict(size).items() if name != "vocab_size"}
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = VerbNumber(VerbNumberConfig(len(vocabulary), **options))
        common: dict[str, Tensor] = defaultdict(
            lambda: torch.randn(model.config.hidden_size) * 0.02
        )
        for place, word in enumerate(vocabulary.words[len(SPECIAL) :], start=len(SPECIAL)):
            forms = [
                f"-{word[-end:]}" for end in (1, 2, 3) if word.islower() and len(word) > end + 1
            ]
            if word in lexicon.number:
                lemma = min(word, lexicon.other[word]) if lexicon.paired(word) else word
                forms += [f"number {lexicon.number[word]}", f"noun {lemma}"]
            for form in forms:
                model.token_embedding.weight[place] += common[form]
        model.token_embedding.weight *= recipe.embedding
        model.position_embedding.weight *= recipe.position
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight *= recipe.linear
    for block in model.blocks:
        block.attention.dropout.p = 0.0  # drawing its noise would cost a tenth of the time
    return model


# ---- the task -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Ids and mask [sentence, position], labels [sentence], and the true ids where words were blanked out, else -100."""

    ids: Tensor
    mask: Tensor
    labels: Tensor
    truth: Tensor


class Batches:
    """The batch of each step, the same for the same seed; asked for in their order, each is made once."""

    def __init__(
        self,
        sentences: Sequence[Sentence],
        vocabulary: Vocabulary,
        lexicon: Lexicon,
        recipe: Recipe,
        seed: int,
    ) -> None:
        self.sentences, self.vocabulary, self.lexicon, self.recipe, self.seed = (
            sentences,
            vocabulary,
            lexicon,
            recipe,
            seed,
        )
        self.pools: Iterator[list[list[tuple[list[int], int]]]] = iter(())
        self.pool: list[list[tuple[list[int], int]]] = []
        self.next = 0  # the number of the next pool

    def __call__(self, step: int) -> Batch:
        """The batch of a step; what lies before it is drawn too, and an earlier step begins anew."""
        wanted = step // POOL
        if wanted < self.next - 1 or self.next == 0:
            self.pools, self.next = self.made(), 0
        while self.next <= wanted:
            self.pool = next(self.pools)
            self.next += 1
        rows = self.pool[step % POOL]
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

    def made(self) -> Iterator[list[list[tuple[list[int], int]]]]:
        """Pools of batches without end."""
        chance, size = random.Random(self.seed), self.recipe.batch
        stream = training_stream(self.sentences, self.lexicon, Mixture(), chance)
        while True:
            drawn = [
                (self.ids_of(each, chance), LABELS.index(each.label))
                for each in islice(stream, size * POOL)
            ]
            drawn.sort(key=lambda each: len(each[0]))
            pool = [drawn[start : start + size] for start in range(0, len(drawn), size)]
            chance.shuffle(pool)
            yield pool

    def ids_of(self, sentence: Sentence, chance: random.Random) -> list[int]:
        """The ids of a sentence, some of its nouns replaced by their tag; cut to what the model takes."""
        number = self.lexicon.number
        longest = VerbNumberConfig(0).max_position_embeddings - 1
        words = [
            ("NN", "NNS")[number[word]]
            if word in number and chance.random() < self.recipe.tag
            else word
            for word in sentence.words
        ]
        return self.vocabulary.ids_of(words[-longest:])


def task_of(
    model: VerbNumber,
    vocabulary: Vocabulary,
    lexicon: Lexicon,
    sides: Mapping[str, Sequence[Sentence]],
    recipe: Recipe,
    seed: int,
) -> Task:
    """What the training loop needs."""

    def measure() -> float:
        """The mean of the accuracies on natural sentences and on those with attractors, as far as there are any."""
        found = groups_of(model, vocabulary, sides["dev"])
        known = [found[name].accuracy for name in ("natural", "attractors") if name in found]
        return sum(known) / len(known)

    return Task(
        module=model,
        steps=recipe.steps,
        batch_at=Batches(sides["train"], vocabulary, lexicon, recipe, seed),
        loss=lambda batch: loss_of(model, batch, recipe),
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
        options={
            "recipe": asdict(recipe),
            "mixture": asdict(Mixture()),
            "data": digest([each.text for each in sides["train"]]),
        },
    )


def loss_of(model: VerbNumber, batch: Batch, recipe: Recipe) -> Tensor:
    """Cross-entropy of the label, and of the blanked words, which the embeddings themselves score."""
    with torch.autocast("cpu", torch.bfloat16):
        states, _ = model.states(batch.ids, batch.mask)
        loss = functional.cross_entropy(
            model.classifier(states[:, 0]).float(), batch.labels, label_smoothing=recipe.smoothing
        )
        blanked = batch.truth >= 0
        if blanked.any():
            words = (
                states[blanked] @ model.token_embedding.weight.T
            )  # [blanked word, word of the vocabulary]
            loss = loss + recipe.blank_loss * functional.cross_entropy(
                words.float(), batch.truth[blanked]
            )
    return loss


# ---- measuring ------------------------------------------------------------------------------------------------------------------


def groups_of(
    model: VerbNumber, vocabulary: Vocabulary, sentences: Sequence[Sentence]
) -> dict[str, Group]:
    """How often the model is right: by file; over sentences with counted attractors, by their number and together; over the rest."""
    model.eval()
    rows = [[vocabulary.cls_token_id, *vocabulary.ids_of(each.words)] for each in sentences]
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    right: dict[int, bool] = {}
    for start in range(0, len(order), MEASURED):
        chosen = order[start : start + MEASURED]
        with torch.no_grad():
            found = (
                model(*pad_ids([rows[place] for place in chosen], vocabulary.pad_token_id))
                .logits.argmax(dim=-1)
                .tolist()
            )
        right |= {
            place: LABELS[label] == sentences[place].label
            for place, label in zip(chosen, found, strict=True)
        }
    members: dict[str, list[int]] = defaultdict(list)
    for place, each in enumerate(sentences):
        members["attractors" if each.attractors else "natural"].append(place)
        members[each.source].append(place)
        if each.attractors and not each.source.endswith(f".{each.attractors}"):
            members[f"{each.source}, {each.attractors} attractors"].append(place)
    return {
        name: Group(len(places), sum(right[place] for place in places))
        for name, places in sorted(members.items())
    }


def command_of(data: Sequence[Path], out: Path, seed: int, steps: int | None) -> str:
    """What to type to train the same again."""
    options = [f"--data={path}" for path in data] + [f"--out={out}", f"--seed={seed}"]
    return shlex.join(
        [
            "attnflow",
            "train",
            "verb-number",
            *options,
            *([] if steps is None else [f"--steps={steps}"]),
        ]
    )


def card(
    found: Mapping[str, Group],
    sizes: Mapping[str, int],
    vocabulary: Vocabulary,
    seed: int,
    recipe: Recipe,
    command: str,
) -> str:
    """The model card."""
    rows = "\n".join(
        f"| {name} | {group.count:,} | {group.accuracy:.3f} |" for name, group in found.items()
    )
    return f"""# Is the verb that follows these words singular or plural?

A Transformer encoder of GPT-2 blocks without a causal mask: 6 layers, 8 heads, width 128, a CLS token in front, whose state in the
last layer goes to the classifier; the model of Abnar and Zuidema (2020), trained anew by attnflow. Weights in float16,
{len(vocabulary):,} words.

## Accuracy on the test side

| sentences | number | accuracy |
| --- | --- | --- |
{rows}

`natural` are the sentences of all files that count no attractors; `attractors` are those of numpred.test.N, which have exactly N
nouns of the other number between subject and verb. The paper reports 0.96, on another split of the full corpus.

## Data and split

Sentences up to their verb, from Linzen, Dupoux and Goldberg (2016), the simple release without its train file and its zero-attractor
test file (numpred.val, numpred.test.1 to 5), and from the MASC corpus (numpred.masc), where every verb tagged VBZ or VBP gives one. So
this is not the paper's split. The licence of the data: Linzen's sentences are from the English Wikipedia (CC BY-SA); MASC is free for
research and commercial use. No sentence is in this folder; the vocabulary lists single words.

The split is by a hash of the first four words: {sizes["train"]:,} sentences train, {sizes["dev"]:,} dev (to choose by),
{sizes["test"]:,} test (measured once). Rows that begin with the same four words stand on one side.

## Training

{recipe.steps:,} steps of {recipe.batch} sentences, seed {seed}: natural sentences, sentences with attractors in five variants, and a
few of a grammar, as attnflow/paper/augmentation.py says; words blanked out by UNK are guessed along the way. The command:

    {command}

## Limits

It reads what stands before a verb, in lower case; a word that it does not know by its class (NN, NNS, NNP, VBG ...), guessed from its
look. MASC's rows may span clauses and ask for verbs that nothing announces, so no model is always right there. Beyond 63 words it
refuses.
"""
