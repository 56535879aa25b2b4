"""The rule for rows that say nothing: near the even row, and no key that stands out of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from attnflow.core.evenness import EVEN, EVEN_PEAK, are_even, find_even_spread, say_nothing
from tests.oracles import Floats


def judge_plainly(shares: list[float]) -> bool:
    """The rule in two lines, for one row whose keys are all seen."""
    even, total = 1 / len(shares), sum(shares)
    spread = sum(abs(share / total - even) for share in shares) / 2 / (1 - even)
    return spread < EVEN and max(shares) / total < EVEN_PEAK * even


def judge(row: Floats, seen: Floats | None = None) -> bool:
    return bool(are_even(row, np.ones(row.shape, bool) if seen is None else seen.astype(bool)))


rows = st.lists(st.floats(0.01, 1.0), min_size=2, max_size=40)
flat_rows = st.lists(st.floats(0.8, 1.3), min_size=2, max_size=40)


@given(rows | flat_rows)
def test_the_rule_is_that_of_two_lines(shares: list[float]) -> None:
    assert judge(np.array(shares)) == judge_plainly(shares)


@given(flat_rows, st.floats(1e-6, 1e6))
def test_neither_scale_nor_order_nor_unseen_keys_matter(shares: list[float], scale: float) -> None:
    row = np.array(shares)
    spread, peak = judge_margin(row)
    if min(abs(spread - EVEN), abs(peak - EVEN_PEAK)) < 1e-9:
        return  # rounding may decide
    expected = judge(row)
    assert judge(scale * row) == expected
    assert judge(row[::-1]) == expected
    seen = np.array([*[True] * len(row), False, False])
    assert judge(np.array([*row, 5.0, 0.0]), seen) == expected


def judge_margin(row: Floats) -> tuple[float, float]:
    shares = row / row.sum()
    even = 1 / len(row)
    return float(np.abs(shares - even).sum() / 2 / (1 - even)), float(shares.max() / even)


@given(st.integers(2, 400), st.floats(0.0, 1.0))
def test_a_row_nearer_to_the_even_row_is_even_too(size: int, part: float) -> None:
    rng = np.random.default_rng(size)
    row = 1.0 + 0.15 * rng.uniform(-1, 1, size)
    if judge(row):
        assert judge(part * row + (1 - part) * row.mean())


@given(st.integers(2, 2000), st.floats(1.3, 50.0))
def test_a_row_in_which_one_key_stands_out_is_never_even(size: int, times: float) -> None:
    """However long it is, and however small its spread is therefore."""
    row = np.ones(size)
    row[size // 2] = times
    stands_out = times / row.mean() >= EVEN_PEAK
    assert judge(row) == (not stands_out and judge_margin(row)[0] < EVEN)
    if size >= 100:
        assert not judge(row)


@pytest.mark.parametrize(
    ("row", "even"),
    [
        ([0.0375] * 9 + [0.041, 0.034], True),  # nine of eleven words alike, by gradient flow
        ([1.22, *[0.98] * 11], True),  # norm flow of MiniLM: the full stop alone is above
        ([1.09, 1.09, 1.07, 1.01, 0.98, 0.94, 0.81], True),  # flow of the verb-number model
        ([1.42, 1.25, 1.20, 1.18, 1.13, 1.11, 1.10, 1.0, 0.97, 0.94, 0.92, 0.84], False),  # rollout
        ([*[1.2] * 10, 0.0, 0.0], False),  # two of twelve keys are left out: that is told
        ([10.0, *[1.0] * 300], False),  # a long row with one word
    ],
)
def test_rows_of_real_models(row: list[float], even: bool) -> None:
    assert judge(np.array(row)) == even


def test_only_rows_of_eight_keys_and_more_are_told_of() -> None:
    for size in (2, 7, 8, 9):
        row = np.ones((1, 1, size))
        seen = np.ones(row.shape, bool)
        assert are_even(row, seen).all()
        assert say_nothing(row, seen).all() == (size >= 8)
        result = af.raw(af.Attention(np.full((1, size, size), 1 / size))).select(0)
        spread = find_even_spread(result.compared_with("even"))
        assert (spread == 0) if size >= 8 else (spread is None)
