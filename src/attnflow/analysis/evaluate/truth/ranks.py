"""Where scores rank the tokens that are known to matter, and intervals of means over families."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnflow.analysis.statistics import RESAMPLES, round_scores
from attnflow.core.arrays import Floats
from attnflow.models.encoded import Encoded

Positions1D = npt.NDArray[np.int64]


class TruthRank(NamedTuple):
    """Where the scores of one prompt rank its true tokens.

    Tokens with the same score share their mean rank.
    """

    reciprocal: float  # 1 / the rank of the value
    hit: float  # 1 if the value alone is first, else 0
    precision: float  # the average precision of value and keys; NaN where keys are not known


def list_ranked(encoded: Encoded) -> Positions1D:
    """The positions that are ranked: all but the first and the last token, and special ones."""
    kept = ~np.array(encoded.special or (False,) * len(encoded.tokens))
    kept[[0, -1]] = False
    return np.flatnonzero(kept)


def rank_truth(
    scores: Floats, ranked: Positions1D, value: int, keys: Sequence[int] = ()
) -> TruthRank:
    """The rank of the value, and the average precision of value and keys.

    >>> scores = np.array([9.0, 0.5, 0.7, 0.1, 9.0])
    >>> rank_truth(scores, np.array([1, 2, 3]), value=1, keys=[2])
    TruthRank(reciprocal=0.5, hit=0.0, precision=1.0)
    """
    from scipy.stats import rankdata

    ranks = dict(zip(ranked.tolist(), rankdata(-round_scores(scores[ranked])), strict=True))
    rank = float(ranks[value])
    precision = np.nan
    if len(keys):
        relevant = np.array([ranks[place] for place in (value, *keys)])
        # [relevant]: how many of the relevant tokens are ranked at least as high
        found = (relevant[None] <= relevant[:, None]).sum(axis=1)
        precision = float(np.minimum(found / relevant, 1.0).mean())
    return TruthRank(1.0 / rank, float(rank == 1.0), precision)


class FamilyMean(NamedTuple):
    """A mean in which families weigh equally, with its 95 % interval."""

    mean: float
    low: float
    high: float
    prompts: int


def average_families(
    values: Floats, families: Sequence[str], *, seed: int = 0, resamples: int = RESAMPLES
) -> FamilyMean:
    """The mean over families of the means of values [prompt], NaN left out.

    The interval is bootstrapped: prompts are resampled within each family.

    >>> average_families(np.array([1.0, 1.0, 0.0]), ["a", "a", "b"])
    FamilyMean(mean=0.5, low=0.5, high=0.5, prompts=3)
    """
    rng = np.random.default_rng(seed)
    groups = split_families(values, families)
    if not groups:
        return FamilyMean(np.nan, np.nan, np.nan, 0)
    means = np.mean([group.mean() for group in groups.values()])
    drawn = [
        group[rng.integers(0, len(group), (resamples, len(group)))].mean(axis=1)
        for group in groups.values()
    ]
    low, high = np.quantile(np.mean(drawn, axis=0), [0.025, 0.975])
    return FamilyMean(float(means), float(low), float(high), sum(map(len, groups.values())))


def split_families(values: Floats, families: Sequence[str]) -> Mapping[str, Floats]:
    """The values of each family that are not NaN; families without any are left out."""
    names = np.array(families)
    groups = {name: values[(names == name) & ~np.isnan(values)] for name in dict.fromkeys(families)}
    return {name: group for name, group in groups.items() if len(group)}
