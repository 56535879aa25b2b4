"""`compute_shard`: some rows of a corpus in, their table and their errors out; it knows no files and no processes.

The numbers depend on the rows of the shard and on the job alone: batches are made within a shard, never across. On processors of one kind
they are the same to the last bit. Which rows are too large depends on the memory of the machine.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.evaluation import queried
from attnflow.analysis.importance import IMPORTANCES
from attnflow.analysis.pipeline import read_batch, score_importance
from attnflow.capturing.assembly import capture
from attnflow.core.attention import Attention
from attnflow.core.graph import AttentionGraph, Floats, check_whole, integers
from attnflow.core.memory import available_memory, in_gigabytes, is_of_memory
from attnflow.core.methods import METHODS
from attnflow.corpus.rows import Row, clean, is_decodable
from attnflow.errors import AttnFlowError, OptionError
from attnflow.models.fingerprint import model_fingerprint as model_fingerprint
from attnflow.models.inputs import Encoded, batches
from attnflow.models.model import Model

if TYPE_CHECKING:
    import pyarrow

SHOWN = 200  # characters of a text that failed
QUERIES = ("focal", "max", "mean")
# why a row has no result
EMPTY, TOO_LONG, TOO_LARGE, UNDECODABLE, UNREADABLE, LABEL, MODEL = (
    "empty",
    "too long",
    "too large",
    "undecodable",
    "unreadable",
    "unknown label",
    "model error",
)
LITTLE = 2**27  # bytes; whether there are that many is not asked


class MethodError(AttnFlowError, RuntimeError):
    """A method that failed, so that its numbers for other texts are not to be trusted either."""


@dataclass(frozen=True)
class Job:
    """What is computed of every text. layers: of each method, those that are stored."""

    methods: tuple[str, ...]
    layers: dict[str, tuple[int, ...]]
    position: str | int  # "focal", "max" or "mean" over all positions, or a position
    normalize: str | None
    residual: float
    importance: tuple[str, ...]
    batch_tokens: int
    keep: tuple[str, ...] = ()  # columns of the input that are stored with the results
    depth: int = 1  # of the model's graphs; no option, but what a row needs depends on it


@dataclass(frozen=True)
class Failure:
    """A row that has no result, and why."""

    row: Row
    reason: str
    detail: str


@dataclass(frozen=True, eq=False)
class Task:
    """A row that the model can take."""

    row: Row
    encoded: Encoded
    target: int | None  # the class that importance watches; None: what is predicted

    @property
    def size(self) -> int:
        """How many positions its graph has."""
        return len(self.encoded.tokens) + len(self.encoded.decoder_tokens)


@dataclass(frozen=True, eq=False)
class Observed:
    """What the model says of a row."""

    task: Task
    attention: Attention
    prediction: tuple[str, float] | None
    importance: dict[str, Floats]  # [token]


@dataclass(frozen=True, eq=False)
class Scored:
    """A row with all its scores."""

    row: Row
    encoded: Encoded
    prediction: tuple[str, float] | None
    scores: dict[str, Floats]  # by method: [layer, token]; by importance: [token]


def plan_job(
    model: Model,
    *,
    methods: Any,
    layers: Any,
    position: Any,
    normalize: str | None,
    residual: float,
    importance: Any,
    batch_tokens: int | None,
    keep: Any = (),
) -> Job:
    """The job that these options mean for a model, tried on two tokens before anything is read.

    layers: the same for every method, or those of each by its name, as a `Job` has them.
    """
    chosen, scored = (
        names_of(methods, METHODS, "method"),
        names_of(importance, IMPORTANCES, "importance"),
    )
    if not chosen:
        raise OptionError(f"at least one method is needed; choose from {', '.join(METHODS)}")
    if position not in QUERIES and (
        isinstance(position, str | bool) or not isinstance(position, int) or position < 0
    ):
        raise OptionError(
            f"unknown position {position!r}; choose from {', '.join(QUERIES)}, or a position from 0 on"
        )
    if batch_tokens is not None:
        check_whole("batch_tokens", batch_tokens)
    if model.is_vision or model.tokenizer is None:
        raise OptionError(
            f"a corpus needs a model that reads texts, with its tokenizer; got {model.name}"
        )
    if scored and (model.is_encoder_decoder or model.task in ("encoder", "encoder-decoder")):
        raise OptionError(
            f"importance is for models that read one sequence of tokens and predict; got {model.name}, {model.task}"
        )
    graph = capture(model, [0, 0]).graph(residual=residual)
    asked = layers if isinstance(layers, dict) else dict.fromkeys(chosen, layers)
    stored = {}
    for name in chosen:
        wanted = asked.get(name)
        if wanted is not None:
            wanted = integers([wanted] if isinstance(wanted, int) else list(wanted), "layers")
        result = METHODS[name](graph, layers=wanted, positions=[0], normalize=normalize)
        stored[name] = result.layers
    kept = tuple(dict.fromkeys([keep] if isinstance(keep, str) else keep))
    taken = result_schema(chosen, scored).names
    for name in kept:
        if name in taken:
            raise OptionError(
                f"keep must name columns that the result has not already; got {name!r}:"
                " rename it in the input"
            )
    tokens = batch_tokens or model.batch_tokens
    return Job(chosen, stored, position, normalize, residual, scored, tokens, kept, graph.depth)


def names_of(chosen: Any, known: dict[str, Any], what: str) -> tuple[str, ...]:
    """Names from one, or several, each once and known."""
    names = (chosen,) if isinstance(chosen, str) else tuple(chosen)
    for name in names:
        if name not in known:
            raise OptionError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def compute_shard(
    model: Model, job: Job, rows: Sequence[Row]
) -> "tuple[pyarrow.Table, pyarrow.Table]":
    """The table of the rows that have a result, and that of those that have none; every row is in exactly one of them."""
    import pyarrow as pa

    failures: list[Failure] = []
    tasks: list[Task] = []
    for row in rows:
        found = examine(model, job, row)
        if isinstance(found, Failure):
            failures.append(found)
        else:
            tasks.append(found)
    # a table for each batch: many small arrays, kept, would leave the memory full of holes
    tables = [result_table(job, [])]
    for places in batches([task.encoded for task in tasks], job.batch_tokens):
        results = [
            observed if isinstance(observed, Failure) else score(model, job, observed)
            for observed in observe(model, job, [tasks[place] for place in places])
        ]
        failures += [each for each in results if isinstance(each, Failure)]
        tables.append(result_table(job, [each for each in results if isinstance(each, Scored)]))
    failures.sort(key=lambda each: each.row.number)
    return pa.concat_tables(tables).combine_chunks().sort_by("row"), error_table(failures)


def examine(model: Model, job: Job, row: Row) -> Task | Failure:
    """A row as the model takes it, with the target of its importance; or why that cannot be."""
    if row.problem is not None:
        return Failure(row, UNREADABLE, row.problem)
    if not is_decodable(row.text):
        return Failure(row, UNDECODABLE, "the text is not UTF-8, or holds a lone surrogate")
    if not row.text.strip():
        return Failure(row, EMPTY, "the text must not be empty")
    try:
        encoded = model.encode(row.text)
    except Exception as error:
        reason = TOO_LONG if is_too_long(model, row.text) else MODEL
        return Failure(row, reason, describe(error))
    if isinstance(job.position, int) and job.position >= len(encoded.tokens):
        return Failure(
            row, MODEL, f"position must be from 0 to {len(encoded.tokens) - 1}; got {job.position}"
        )
    target = None
    if job.importance and row.label is not None:
        try:
            target = model.target(row.label)
        except AttnFlowError as error:
            return Failure(row, LABEL, str(error))
    return Task(row, encoded, target)


def is_too_long(model: Model, text: str) -> bool:
    try:
        return (
            model.max_length is not None
            and len(model.tokenizer(text, verbose=False)["input_ids"]) > model.max_length
        )
    except Exception:  # a tokenizer that fails on this text, whatever it raises
        return False


def describe(error: BaseException) -> str:
    """An error in one line."""
    return str(AttnFlowError(error)) or type(error).__name__


def observe(model: Model, job: Job, batch: Sequence[Task]) -> Iterator[Observed | Failure]:
    """What the model says of each row; where it fails, each by itself, to keep the others."""
    try:
        check_memory(job, batch)
        found = run_model(model, job, batch)
    except Exception as error:  # a model is foreign code, and may raise anything
        if len(batch) > 1:
            for task in batch:
                yield from observe(model, job, [task])
        else:
            yield failure_of(job, batch[0], error)
    else:
        yield from found


def failure_of(job: Job, task: Task, error: Exception) -> Failure:
    """Why the model has nothing to say of a row."""
    if not is_of_memory(error):
        return Failure(task.row, MODEL, describe(error))
    needed = in_gigabytes(memory_needed(job, [task]))
    detail = f"{task.size:,} tokens need about {needed} of memory: {describe(error)}"
    return Failure(task.row, TOO_LARGE, detail)


def run_model(model: Model, job: Job, batch: Sequence[Task]) -> list[Observed]:
    """One forward pass for the prediction and the attention of each row; then importance."""
    position = None if isinstance(job.position, str) else job.position
    readings = read_batch(
        model,
        [task.encoded for task in batch],
        targets=[task.target for task in batch],
        position=position,
    )
    importance: list[dict[str, Floats]] = [{} for _ in batch]
    for name in job.importance:
        found = score_importance(
            model, readings, name, position=position, batch_tokens=job.batch_tokens
        )
        for place, each in enumerate(found):
            importance[place][name] = each.values
    return [
        Observed(task, reading.attention, reading.prediction, scores)
        for task, reading, scores in zip(batch, readings, importance, strict=True)
    ]


def score(model: Model, job: Job, observed: Observed) -> Scored | Failure:
    """All methods on the attention of one row.

    They must take whatever a model gives, so that an error is the method's and not the row's.
    """
    task = observed.task
    scores: dict[str, Floats] = {}
    name = "the attention graph"
    try:
        graph = observed.attention.graph(residual=job.residual)
        for name in job.methods:
            scores[name] = token_attention(model, job, name, graph, task.encoded)
    except Exception as error:
        if is_of_memory(error):
            return failure_of(job, task, error)
        raise MethodError(
            f"{name} failed on row {task.row.number} ({task.row.id}):"
            f" {type(error).__name__}: {describe(error)}"
        ) from error
    scores |= observed.importance
    return Scored(task.row, task.encoded, observed.prediction, scores)


def token_attention(
    model: Model, job: Job, name: str, graph: AttentionGraph, encoded: Encoded
) -> Floats:
    """[layer, token] of one method at the position, or over the positions, that the job says."""
    found = queried(
        model, name, graph, encoded, job.position, layers=job.layers[name], normalize=job.normalize
    )
    if not np.isfinite(found).all():
        raise OptionError(f"{name} of this text is not finite")
    return found


# ---- memory ---------------------------------------------------------------------------------


def check_memory(job: Job, batch: Sequence[Task]) -> None:
    """Refuse a batch that needs more memory than there is: Linux would promise it, then kill."""
    needed = memory_needed(job, batch)
    available = available_memory() if needed > LITTLE else None
    if available is not None and needed > available:
        raise MemoryError(f"{in_gigabytes(available)} are available")


def memory_needed(job: Job, batch: Sequence[Task]) -> int:
    """About how many bytes a batch takes, at least, beside the model itself.

    Capture keeps one float32 matrix per layer and row, padding included. Then, one row at a time:
    the graph's weights and its edges, a float64 matrix per layer each, and about two more for what
    is computed with them. Measured with a Llama and a BERT of 3 layers on 2,000 tokens: within 5 %
    of 4 + 2 * 8 bytes per layer, and 2 * 8. Flow and rollout of all positions take half as much
    again, and models that give their weights of all heads (BLOOM, DeBERTa) twice as much or more.
    """
    size = max(task.size for task in batch)
    return size**2 * (job.depth * (4 * len(batch) + 2 * 8) + 2 * 8)


# ---- tables -----------------------------------------------------------------------------------------------------------------------


def result_schema(
    methods: Sequence[str], importance: Sequence[str], keep: Sequence[str] = ()
) -> "pyarrow.Schema":
    """The columns of a shard; those that were kept of the input stand last."""
    import pyarrow as pa

    fields = {
        "id": pa.string(),
        "row": pa.int64(),
        "text": pa.string(),
        "tokens": pa.list_(pa.string()),
        "special": pa.list_(pa.bool_()),
        "words": pa.list_(pa.int32()),
        "label": pa.string(),
        "prediction": pa.string(),
        "probability": pa.float64(),
    }
    fields |= {name: pa.list_(pa.list_(pa.float32())) for name in methods}
    fields |= {name: pa.list_(pa.float32()) for name in importance}
    fields |= {name: pa.string() for name in keep}
    return pa.schema(list(fields.items()))


def error_schema() -> "pyarrow.Schema":
    """The columns of errors.parquet."""
    import pyarrow as pa

    return pa.schema(
        [
            ("id", pa.string()),
            ("row", pa.int64()),
            ("reason", pa.string()),
            ("detail", pa.string()),
            ("text", pa.string()),
        ]
    )


def result_table(job: Job, results: Sequence[Scored]) -> "pyarrow.Table":
    """One row a text."""
    import pyarrow as pa

    def tokens_of(each: Scored) -> list[str | None]:
        return [clean(token) for token in (*each.encoded.tokens, *each.encoded.decoder_tokens)]

    def special_of(each: Scored) -> list[bool]:
        return [*each.encoded.special, *[False] * len(each.encoded.decoder_tokens)]

    def words_of(each: Scored) -> list[int | None] | None:
        words = each.encoded.words
        return None if words is None else [*words, *[None] * len(each.encoded.decoder_tokens)]

    columns: dict[str, Any] = {
        "id": [each.row.id for each in results],
        "row": [each.row.number for each in results],
        "text": [each.row.text for each in results],
        "tokens": [tokens_of(each) for each in results],
        "special": [special_of(each) for each in results],
        "words": [words_of(each) for each in results],
        "label": [each.row.label for each in results],
        "prediction": [
            None if each.prediction is None else clean(each.prediction[0]) for each in results
        ],
        "probability": [
            None if each.prediction is None else each.prediction[1] for each in results
        ],
    }
    for name in job.methods:
        rows = [
            row for each in results for row in each.scores[name]
        ]  # [token], one for each text and layer
        columns[name] = lists(
            lists(floats(rows), map(len, rows)), (len(each.scores[name]) for each in results)
        )
    for name in job.importance:
        scores = [each.scores[name] for each in results]
        columns[name] = lists(floats(scores), map(len, scores))
    columns |= {
        name: [each.row.kept[place] for each in results] for place, name in enumerate(job.keep)
    }
    return pa.table(columns, schema=result_schema(job.methods, job.importance, job.keep))


def floats(rows: Sequence[Floats]) -> Any:
    return np.concatenate(rows).astype(np.float32) if rows else np.empty(0, np.float32)


def lists(values: Any, lengths: Any) -> Any:
    """A pyarrow array of lists, cut from one array of values after the other; much faster than Python's lists."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(
        pa.array(np.cumsum([0, *lengths]), pa.int32()), pa.array(values)
    )


def error_table(failures: Sequence[Failure]) -> "pyarrow.Table":
    """One row a failure; the text cut, and escaped where it is none."""
    import pyarrow as pa

    content = [
        {
            "id": each.row.id,
            "row": each.row.number,
            "reason": each.reason,
            "detail": clean(each.detail),
            "text": (clean(each.row.text[:SHOWN]) or "")[:SHOWN],
        }
        for each in failures
    ]
    return pa.Table.from_pylist(content, schema=error_schema())


def reasons_of(errors: "pyarrow.Table") -> dict[str, int]:
    """How many rows failed for which reason."""
    return dict(sorted(Counter(errors.column("reason").to_pylist()).items()))


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which torch has one thread, so that sums are added up in one order."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
