"""A first pass over the input: its rows counted, repeated ids and unknown labels reported."""

from array import array
from itertools import islice

import numpy as np
import numpy.typing as npt

from attnflow.corpus.formats import TellUser
from attnflow.corpus.rows import InputFiles
from attnflow.errors import AttnFlowError, OptionError
from attnflow.models.model import Model

SHOWN_LABELS = 3  # of the unknown ones
KNOWN_LABELS = 1000  # different labels that are remembered


def survey_input(inputs: InputFiles, model: Model, notify: TellUser, *, watched: bool) -> int:
    """Count the rows, and report problems of the input before anything is computed.

    watched: whether labels are the targets of importance, or of gradient edges.
    """
    count, ids = 0, array("q")  # 8 bytes per row are enough to see that an id is repeated
    unknown: dict[str, None] = {}
    known: dict[str, bool] = {}
    labels = [0, 0]  # rows with an unknown label, and with a known one
    for row in inputs.rows(notify):
        count += 1
        if inputs.columns.id is not None:
            ids.append(hash(row.id))
        if watched and row.label is not None and row.problem is None:
            if row.label not in known and len(known) < KNOWN_LABELS:
                known[row.label] = is_class(model, row.label)
            fits = known[row.label] if row.label in known else is_class(model, row.label)
            labels[fits] += 1
            if not fits and len(unknown) < SHOWN_LABELS:
                unknown[row.label] = None
    if labels[False] > labels[True]:  # stars from 1 to 5 hold some class numbers by accident
        raise OptionError(
            "importance and gradient edges watch the class that a label names, and"
            f" {labels[False]:,} of {sum(labels):,} labels in {inputs.columns.label!r} are not"
            f" classes of {model.name}; got {', '.join(map(repr, unknown))}: give another"
            " label_column, or none",
            options=["label_column"],
        )
    notify_repeated(inputs, np.frombuffer(ids, np.int64), notify)
    return count


def is_class(model: Model, label: str) -> bool:
    """Whether a label names a class of the model."""
    try:
        model.target(label)
    except AttnFlowError:
        return False
    return True


def notify_repeated(inputs: InputFiles, ids: npt.NDArray[np.int64], notify: TellUser) -> None:
    """Tell which id several rows have, and how many do; ids: a hash per row, in their order."""
    order = np.argsort(ids, kind="stable")
    repeated = order[1:][np.diff(ids[order]) == 0]  # rows whose id an earlier row has
    if not len(repeated):
        return
    second = int(repeated.min())
    first = int(np.flatnonzero(ids == ids[second])[0])
    shared = next(islice(inputs.rows(), second, None)).id
    notify(
        f"ids in {inputs.columns.id!r} are repeated: rows {first} and {second} both have"
        f" {shared!r}; {len(repeated):,} of {len(ids):,} rows have an id that an earlier row has"
    )
