"""`compute_shard`: some rows of a corpus in, their table and their errors out; it knows no files and no processes.

The numbers depend on the rows of the shard and on the job alone: batches are made within a shard, never across. On processors of one kind
they are the same to the last bit.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.capture import capture, capture_batch
from attnflow.corpus_input import Row, clean, is_decodable
from attnflow.errors import AttnFlowError, OptionError
from attnflow.evaluate import queried
from attnflow.graph import AttentionGraph, Floats, check_whole, integers
from attnflow.importance import IMPORTANCES
from attnflow.inputs import Encoded, batches
from attnflow.methods import METHODS
from attnflow.models import Model

if TYPE_CHECKING:
    import pyarrow

SHOWN = 200  # characters of a text that failed
QUERIES = ("focal", "max", "mean")
# why a row has no result
EMPTY, TOO_LONG, UNDECODABLE, UNREADABLE, LABEL, MODEL = (
    "empty",
    "too long",
    "undecodable",
    "unreadable",
    "unknown label",
    "model error",
)


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


@dataclass(frozen=True)
class Failure:
    """A row that has no result, and why."""

    row: Row
    reason: str
    detail: str


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
) -> Job:
    """The job that these options mean for a model, tried on two tokens: what is wrong is refused before anything is read."""
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
    wanted = (
        None
        if layers is None
        else tuple(integers([layers] if isinstance(layers, int) else list(layers), "layers"))
    )
    stored = {}
    for name in chosen:
        result = METHODS[name](graph, layers=wanted, positions=[0], normalize=normalize)
        stored[name] = result.layers
    return Job(
        chosen, stored, position, normalize, residual, scored, batch_tokens or model.batch_tokens
    )


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
    readable: list[tuple[Row, Encoded, int | None]] = []  # with the class that importance watches
    for row in rows:
        found = examine(model, job, row)
        if isinstance(found, Failure):
            failures.append(found)
        else:
            readable.append((row, *found))
    tables = [
        result_table(job, [])
    ]  # of each batch: many small arrays, kept, would leave the memory full of holes
    for places in batches([encoded for _, encoded, _ in readable], job.batch_tokens):
        batch = [readable[place] for place in places]
        try:
            tables.append(result_table(job, score(model, job, batch)))
        except (RuntimeError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
            # one text of the batch is to blame: each by itself, so that the others have their result
            for each in batch:
                try:
                    tables.append(result_table(job, score(model, job, [each])))
                except (
                    RuntimeError,
                    ValueError,
                    ArithmeticError,
                    LookupError,
                    TypeError,
                    AttributeError,
                ) as error:
                    failures.append(
                        Failure(each[0], MODEL, str(AttnFlowError(error)) or type(error).__name__)
                    )
    failures.sort(key=lambda each: each.row.number)
    return pa.concat_tables(tables).combine_chunks().sort_by("row"), error_table(failures)


def examine(model: Model, job: Job, row: Row) -> "tuple[Encoded, int | None] | Failure":
    """A row's text as the model takes it, and the target of its importance; or why there is none."""
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
        return Failure(row, reason, str(AttnFlowError(error)) or type(error).__name__)
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
    return encoded, target


def is_too_long(model: Model, text: str) -> bool:
    try:
        return (
            model.longest is not None
            and len(model.tokenizer(text, verbose=False)["input_ids"]) > model.longest
        )
    except Exception:  # a tokenizer that fails on this text, whatever it raises
        return False


def score(model: Model, job: Job, batch: Sequence[tuple[Row, Encoded, int | None]]) -> list[Scored]:
    """One forward pass for the prediction and for all methods; then importance."""
    import torch

    inputs = [encoded for _, encoded, _ in batch]
    outputs: list[Any] = []
    handle = model.model.register_forward_hook(
        lambda module, arguments, output: outputs.append(output)
    )
    try:
        attentions = capture_batch(model, inputs, "mean")
    finally:
        handle.remove()
    predictions: list[tuple[str, float] | None] = [None] * len(batch)
    at = None
    if (
        isinstance(job.position, int)
        and not model.is_encoder_decoder
        and model.task != "sequence classification"
    ):
        at = job.position
    if model.task not in ("encoder", "encoder-decoder"):
        with torch.no_grad():
            probabilities = model.probabilities(
                model.read_logits(outputs[-1], [model.logit_position(each, at) for each in inputs])
            )
        best = probabilities.argmax(dim=-1)
        predictions = [
            (model.label(int(place)), float(probabilities[row, place]))
            for row, place in enumerate(best)
        ]
    scores: list[dict[str, Floats]] = []
    for encoded, attention in zip(inputs, attentions, strict=True):
        graph = attention.graph(residual=job.residual)
        scores.append(
            {name: token_attention(model, job, name, graph, encoded) for name in job.methods}
        )
    for name in job.importance:
        targets = [target for _, _, target in batch]
        found = IMPORTANCES[name](
            model,
            [list(each.ids) for each in inputs],
            targets,
            position=at,
            batch_tokens=job.batch_tokens,
        )
        for place, each in enumerate(found):
            scores[place][name] = each.values
    return [
        Scored(row, each, said, found)
        for (row, each, _), said, found in zip(batch, predictions, scores, strict=True)
    ]


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


# ---- tables -----------------------------------------------------------------------------------------------------------------------


def result_schema(methods: Sequence[str], importance: Sequence[str]) -> "pyarrow.Schema":
    """The columns of a shard."""
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
    return pa.table(columns, schema=result_schema(job.methods, job.importance))


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


# ---- the model --------------------------------------------------------------------------------------------------------------------


def model_fingerprint(model: Model) -> str:
    """SHA-256 over a model's configuration, vocabulary and weights; where it was loaded from does not count."""
    import torch

    config = model.model.config
    options = (
        asdict(config)
        if is_dataclass(config) and not isinstance(config, type)
        else dict(config.to_dict())
    )
    for name in ("_name_or_path", "transformers_version"):
        options.pop(name, None)
    digest = hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode())
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    vocabulary = (
        backend.to_str()
        if backend is not None
        else json.dumps(sorted(model.tokenizer.get_vocab().items()))
    )
    digest.update(vocabulary.encode("utf-8", "backslashreplace"))
    for name, weight in sorted(model.model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
