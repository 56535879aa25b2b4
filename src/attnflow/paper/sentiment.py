"""A sentiment classifier: any encoder, fine-tuned on whole sentences of SST-2.

SST-2 is the Stanford Sentiment Treebank with two labels.
"""

import os
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from attnflow.core.io.files import read_lines
from attnflow.errors import AttnFlowError, FileError
from attnflow.models.encoded import pad_ids
from attnflow.models.model import Model
from attnflow.paper.checkpoint import WEIGHTS, claim_folder, digest
from attnflow.paper.training import Optimiser, TellLine, TrainingTask, require, run_training

SENTIMENTS = ("negative", "positive")
TSV_HEADER = "sentence\tlabel"  # GLUE's files begin with it
MAX_TOKENS = 96  # the longest sentence of SST-2 has about 70
BATCH_SENTENCES = 32
SENTIMENT_POOL = 50  # batches whose sentences are sorted by length together, to reduce padding
SENTIMENT_EVALUATION_BATCH = 64  # sentences per batch without gradients
RATE = 1e-4
HEAD_RATE = 5.0  # times RATE: the classifier starts from random weights, the encoder does not
AVERAGE = 0.99

Labelled = tuple[str, int]  # a sentence, and the number of its label


@dataclass(frozen=True)
class EncodedSentence:
    """A labelled sentence as the model takes it."""

    ids: tuple[int, ...]
    label: int


@dataclass(frozen=True)
class SentimentResult:
    """A trained classifier: where it is, and how often it is right."""

    folder: Path
    dev: float
    test: float
    steps: int
    seconds: float


# ---- data ----------------------------------------------------------------------------------------


def read_sst2(path: str | os.PathLike[str]) -> list[Labelled]:
    r"""The rows of a file: a sentence, a tab, 0 (negative) or 1 (positive).

    GLUE's header line is left out.

    >>> _ = Path("two.tsv").write_text("a joy\t1\na bore\t0\n")
    >>> read_sst2("two.tsv")
    [('a joy', 1), ('a bore', 0)]
    """
    rows = [
        read_row(path, number, text)
        for number, text in read_lines(path)
        if (number, text) != (1, TSV_HEADER)
    ]
    if not rows:
        raise FileError(f"{path} holds no sentences; each line must be a sentence, a tab, 0 or 1")
    return rows


def read_row(path: object, number: int, text: str) -> Labelled:
    """The sentence and the label of a line."""
    parts = text.split("\t")
    if len(parts) != 2 or not parts[0].strip():
        raise FileError(
            f"{path}, line {number}: a line must be a sentence, a tab, 0 or 1; got {text[:80]!r}"
        )
    if parts[1] not in ("0", "1"):
        raise FileError(
            f"{path}, line {number}: a label must be 0 (negative) or 1 (positive); "
            f"got {parts[1][:80]!r}"
        )
    return parts[0], int(parts[1])


def encode_sentences(model: Model, rows: Sequence[Labelled]) -> list[EncodedSentence]:
    """Token ids of sentences, cut to what the model takes."""
    max_length = min(MAX_TOKENS, model.max_length or MAX_TOKENS)
    encoded = [
        model.tokenizer(sentence, truncation=True, max_length=max_length)["input_ids"]
        for sentence, _ in rows
    ]
    return [
        EncodedSentence(tuple(ids), label) for ids, (_, label) in zip(encoded, rows, strict=True)
    ]


def make_batches(
    sentences: Sequence[EncodedSentence], seed: int, epoch: int
) -> list[list[EncodedSentence]]:
    """An epoch's batches, shuffled, but with sentences of similar length together.

    The same seed and epoch give the same batches.
    """
    chance = random.Random(f"{seed}/{epoch}")
    order = chance.sample(sentences, len(sentences))
    size, pool_size = BATCH_SENTENCES, SENTIMENT_POOL * BATCH_SENTENCES
    pools = [
        sorted(order[start : start + pool_size], key=lambda sentence: len(sentence.ids))
        for start in range(0, len(order), pool_size)
    ]
    batches = [pool[start : start + size] for pool in pools for start in range(0, len(pool), size)]
    chance.shuffle(batches)
    return batches


# ---- training ------------------------------------------------------------------------------------


def train_sentiment(
    base: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    epochs: int = 3,
    seed: int = 0,
    resume: bool = False,
    limit: int | None = None,
    report: TellLine | None = None,
) -> SentimentResult:
    """Fine-tune the encoder in `base` on `data`/train.tsv, and write the model to `out`.

    The weights are chosen by dev.tsv and measured once on test.tsv. `out` is then a folder for
    `attnflow.load`. limit: the maximum number of training sentences. resume: continue from the
    checkpoint in `out`.
    """
    require("epochs", epochs, "1 or more", epochs >= 1)
    require("limit", limit, "1 or more", limit is None or limit >= 1)
    folder = Path(out)
    rows = {name: read_sst2(Path(data) / f"{name}.tsv") for name in ("train", "dev", "test")}
    rows["train"] = rows["train"][:limit]
    claim_folder(
        folder, resume
    )  # repeated in `run_training`; checked here before the model is loaded
    model = load_base(base, seed)
    sides = {name: encode_sentences(model, labelled) for name, labelled in rows.items()}
    task = make_sentiment_task(
        model, sides["train"], sides["dev"], epochs, seed, digest([rows["train"], rows["dev"]])
    )
    test = 0.0

    def save(module: nn.Module) -> None:
        nonlocal test
        dev, test = (
            measure_sentiment_accuracy(model, sides["dev"]),
            measure_sentiment_accuracy(model, sides["test"]),
        )
        options = {"epochs": epochs, "seed": seed, **({} if limit is None else {"limit": limit})}
        command = format_sentiment_command(base, data, out, options)
        sizes = {name: len(side) for name, side in sides.items()}
        write_model(model, folder, format_sentiment_card(Path(base), sizes, dev, test, command))

    outcome = run_training(task, folder, seed=seed, resume=resume, save=save, report=report)
    return SentimentResult(folder, outcome.accuracy, test, outcome.steps, outcome.seconds)


def make_sentiment_task(
    model: Model,
    training: Sequence[EncodedSentence],
    dev: Sequence[EncodedSentence],
    epochs: int,
    seed: int,
    data: str,
) -> TrainingTask[Sequence[EncodedSentence]]:
    """What the training loop needs: batches, the loss, accuracy on dev twice per epoch."""
    per_epoch = -(-len(training) // BATCH_SENTENCES)

    @lru_cache(maxsize=1)
    def batches_in(epoch: int) -> list[list[EncodedSentence]]:
        return make_batches(training, seed, epoch)

    def loss(batch: Sequence[EncodedSentence]) -> Tensor:
        labels = torch.tensor([sentence.label for sentence in batch])
        return nn.functional.cross_entropy(compute_logits(model, batch), labels)

    return TrainingTask(
        module=model.model,
        steps=epochs * per_epoch,
        batch_at=lambda step: batches_in(step // per_epoch)[step % per_epoch],
        loss=loss,
        measure=lambda: measure_sentiment_accuracy(model, dev),
        every=-(-per_epoch // 2),
        optimiser=Optimiser(learning_rate=RATE, warm_up=0.1),
        scale=scale_rate,
        average=AVERAGE,
        options={"epochs": epochs, "data": data, "batch": BATCH_SENTENCES},
    )


def scale_rate(name: str) -> float:
    """The learning rate of a parameter, in RATE: more for the new classifier."""
    return HEAD_RATE if name.startswith(("classifier", "score", "pre_classifier")) else 1.0


def compute_logits(model: Model, batch: Sequence[EncodedSentence]) -> Tensor:
    """[sentence, label]"""
    ids, mask = pad_ids([sentence.ids for sentence in batch], model.padding)
    return model.model(input_ids=ids, attention_mask=mask).logits


def measure_sentiment_accuracy(model: Model, sentences: Sequence[EncodedSentence]) -> float:
    """The share of sentences whose label the model gives; the model must be in eval mode."""
    ordered = sorted(sentences, key=lambda sentence: len(sentence.ids))
    right = 0
    with torch.no_grad():
        for start in range(0, len(ordered), SENTIMENT_EVALUATION_BATCH):
            batch = ordered[start : start + SENTIMENT_EVALUATION_BATCH]
            given = compute_logits(model, batch).argmax(dim=-1).tolist()
            right += sum(
                label == sentence.label for label, sentence in zip(given, batch, strict=True)
            )
    return right / len(sentences)


# ---- files ---------------------------------------------------------------------------------------


def load_base(base: str | os.PathLike[str], seed: int) -> Model:
    """An encoder with a new classifier of two labels, initialised from the seed."""
    import transformers

    names = {
        "id2label": dict(enumerate(SENTIMENTS)),
        "label2id": {label: number for number, label in enumerate(SENTIMENTS)},
    }
    try:
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(seed)
            classifier = transformers.AutoModelForSequenceClassification.from_pretrained(
                base,
                num_labels=len(SENTIMENTS),
                ignore_mismatched_sizes=True,
                use_safetensors=True,
                trust_remote_code=False,
                **names,
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileError(
            f"the base must be the folder of an encoder and its tokenizer; got {base}: {reason}"
        ) from error
    # half of the parameters of MiniLM; 7,000 sentences hold too few words to train them
    classifier.get_input_embeddings().requires_grad_(False)
    return Model(classifier, tokenizer)


def write_model(model: Model, folder: Path, readme: str) -> None:
    """Write model, tokenizer and card to a folder.

    All is written inside it under another name first, and the weights are renamed last.
    """
    from safetensors import SafetensorError

    try:
        for leftover in folder.glob(".attnflow-*"):  # of a save that was killed
            shutil.rmtree(leftover)
        with TemporaryDirectory(dir=folder, prefix=".attnflow-") as name, quiet():
            beside = Path(name)
            model.model.save_pretrained(beside)
            model.tokenizer.save_pretrained(beside)
            (beside / "README.md").write_text(readme, encoding="utf-8")
            # safetensors makes its files readable by their owner only
            shutil.copymode(beside / "README.md", beside / WEIGHTS)
            for path in sorted(beside.iterdir(), key=lambda path: path.name == WEIGHTS):
                path.replace(folder / path.name)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, AttnFlowError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"cannot write {folder}: {reason}; pass --resume to try again") from error


def format_sentiment_command(
    base: object, data: object, out: object, options: Mapping[str, int]
) -> str:
    """The command that trains the same model again."""
    paths = [f"--base={base}", f"--data={data}", f"--out={out}"]
    others = [f"--{name}={value}" for name, value in options.items()]
    return shlex.join(["attnflow", "train", "sentiment", *paths, *others])


def format_sentiment_card(
    base: Path, sizes: Mapping[str, int], dev: float, test: float, command: str
) -> str:
    """The model card."""
    return f"""# Is this sentence positive or negative?

`{base.parent.name}/{base.name}`, fine-tuned by attnflow on whole sentences of SST-2 (Stanford
Sentiment Treebank, labels 0 = negative, 1 = positive).

| part | sentences | accuracy |
| --- | --- | --- |
| train | {sizes["train"]} | |
| dev (chose the weights) | {sizes["dev"]} | {dev:.4f} |
| test (measured once) | {sizes["test"]} | {test:.4f} |

The command that trained it and prints these figures:

    {command}
"""


@contextmanager
def quiet() -> Iterator[None]:
    """A block in which transformers shows no progress and does not warn of the new classifier."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        restore: Callable[[], None] = (
            logging.enable_progress_bar if bars else logging.disable_progress_bar
        )
        restore()
