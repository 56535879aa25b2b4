"""Statistics of scores: rank correlation."""

import numpy as np

from attnflow.core.arrays import Floats

# scores of one example that agree to so many digits of the largest are equal: the rest is rounding
TIE_DIGITS = 9


def spearman(scores: Floats, importance: Floats) -> Floats:
    """[layer]: Spearman's rank correlation of scores [layer, token] with importance [token].

    Ties share their mean rank. NaN where it is undefined: fewer than two tokens, or all equal.

    >>> scores = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    >>> spearman(scores, np.array([0.1, 0.2, 0.9]))
    array([ 1., -1., nan])
    """
    from scipy.stats import rankdata

    rows = np.vstack([scores, importance])
    if rows.shape[1] < 2 or not np.isfinite(rows).all():
        return np.full(len(scores), np.nan)
    ranks = rankdata(round_scores(rows), axis=1)
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    lengths = np.sqrt((centred**2).sum(axis=1))
    product = lengths[:-1] * lengths[-1]
    correlations: Floats = np.full(len(scores), np.nan)
    np.divide(centred[:-1] @ centred[-1], product, out=correlations, where=product > 0)
    return np.clip(correlations, -1.0, 1.0)


def round_scores(scores: Floats) -> Floats:
    """Scores [..., token] relative to the largest of their row, without what is rounding."""
    largest = np.abs(scores).max(axis=-1, keepdims=True, initial=0.0)
    rounded: Floats = np.round(scores / np.where(largest > 0, largest, 1.0), TIE_DIGITS)
    return rounded
