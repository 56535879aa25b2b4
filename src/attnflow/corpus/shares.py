"""Shares of segments: a row of a corpus job that folds every text to its sentences, lines or words.

One forward pass per text, without matrices (capturing/segments.py), so texts may be long.
"""

from collections.abc import Mapping
from typing import Any

from attnflow.analysis.long_inputs import locate_logits, read_prediction
from attnflow.capturing.asking import RowRequest
from attnflow.capturing.prompts import read_prompt
from attnflow.capturing.segments import roll_segments
from attnflow.capturing.spans import KINDS
from attnflow.corpus.rows import Row
from attnflow.corpus.shard_tables import ScoredRow
from attnflow.errors import OptionError
from attnflow.models.model import Model

METHOD = "rollout"  # what shares are of
TEXT_KINDS = tuple(kind for kind in KINDS if kind != "turns")  # a text has no turns
# what a job of segments can be asked for beside them
ALLOWED: dict[str, tuple[Any, ...]] = {
    "methods": ((METHOD,),),
    "edges": (("attention",),),
    "importance": ((),),
    "graph": (None,),
    "normalize": ("sum", "receptive_field"),
}


def check_shares(segments: Any, options: Mapping[str, Any]) -> None:
    """Refuse what are no segments of a text, and options that shares of them cannot have."""
    if segments not in TEXT_KINDS:
        raise OptionError(f"unknown segments {segments!r}; choose from {', '.join(TEXT_KINDS)}")
    for name, allowed in ALLOWED.items():
        if options[name] not in allowed:
            raise OptionError(
                f"shares of segments are of rollout on attention; got {name} {options[name]!r}:"
                " leave it out"
            )
    if options["position"] in ("max", "mean"):
        raise OptionError(
            f"shares of segments are of one position; got {options['position']!r}: choose focal, or"
            " a position from 0 on"
        )


def share_row(
    model: Model,
    row: Row,
    segments: str,
    position: str | int,
    layers: tuple[int, ...],
    **options: Any,
) -> ScoredRow:
    """The share of each segment of one text, [layer, segment]. options are a request's."""
    prompt = read_prompt(model, row.text, truncation=False, places=True)
    encoded = prompt.encoded
    place = model.locate(encoded, None if isinstance(position, str) else position)
    request = RowRequest.read(model, encoded, METHOD, [place], layers, **options)
    at = locate_logits(model, encoded, place)
    shares, output = roll_segments(request, prompt, segments, "positions", logits_at=at)
    scores = {METHOD: shares.values[:, 0]}
    prediction = read_prediction(model, output, at)
    return ScoredRow(row, encoded, prediction, scores, request.removed, shares.groups or ())
