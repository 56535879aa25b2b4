"""Shares of segments: a row of a corpus job that folds every text to its sentences, lines or words.

One forward pass per text, without matrices (rows/segments.py), so texts may be long.
"""

from collections.abc import Mapping

from attnflow.analysis.job import Job
from attnflow.analysis.long_inputs import locate_logits, read_prediction
from attnflow.core.graph import RESIDUAL
from attnflow.corpus.job import SHARES_METHOD
from attnflow.corpus.rows import CorpusRow
from attnflow.corpus.shard_tables import ScoredRow
from attnflow.edges.edge_weight import EDGES
from attnflow.models.encoded import Encoded
from attnflow.models.model import Model
from attnflow.rows.request import RowRequest
from attnflow.rows.segments import roll_segments


def share_row(model: Model, row: CorpusRow, encoded: Encoded, job: Job) -> ScoredRow:
    """The share of each segment of one text, [layer, segment]."""
    assert job.segments is not None
    assert isinstance(job.layers, Mapping)
    assert job.normalize is not None
    place = model.locate(encoded, job.asked_position)
    request = RowRequest.read(
        model,
        encoded,
        SHARES_METHOD,
        [place],
        job.layers[SHARES_METHOD],
        residual=RESIDUAL if job.residual is None else job.residual,
        without=job.without,
        normalize=job.normalize,
    )
    at = locate_logits(model, encoded, place)
    weight = EDGES[request.edges]
    shares, output = roll_segments(request, job.segments, "positions", weight, logits_at=at)
    scores = {SHARES_METHOD: shares.values[:, 0]}
    prediction = read_prediction(model, output, at)
    return ScoredRow(row, encoded, prediction, scores, request.removed, shares.groups or ())
