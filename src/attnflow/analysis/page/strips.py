"""The data of the pages of two rows: explanations side by side, and interventions."""

import math

from attnflow.analysis.exclude import find_excluded
from attnflow.analysis.explain.compare import Side, SideBySide
from attnflow.analysis.intervene.intervention import Intervention, share_rest
from attnflow.analysis.page import schema
from attnflow.analysis.page.page import describe_prediction
from attnflow.core.arrays import Floats
from attnflow.core.text import show_token
from attnflow.errors import printable


def describe_pair(pair: SideBySide) -> schema.Strips:
    """Two explanations side by side, aligned, with the difference.

    >>> import attnflow as af
    >>> explanation = af.explain("the keys to the house")
    >>> describe_pair(af.compare(explanation, methods=("rollout", "flow"))).columns
    ('token', 'rollout', 'flow', 'difference')
    """
    rows = list(pair.rows())
    sides = (describe_side(pair.left), describe_side(pair.right))
    left_out = [
        f"{side.left_out:.0%} of {name} on special tokens, sinks and the explained position is left"
        " out."
        for side, name in ((pair.left, "the upper row"), (pair.right, "the lower row"))
        if side.left_out >= 0.005
    ]
    even = [
        f"{name} hardly differs between {pair.unit}s (spread {side.even:.1g}): it says nothing."
        for side, name in ((pair.left, "The upper row"), (pair.right, "The lower row"))
        if side.even is not None
    ]
    caption = (
        f"Above: {name_side(pair.left)}. Below: {name_side(pair.right)}. Blue: its share, one scale"
        " for both. Bars: the lower row minus the upper one, blue for more, orange for less."
    )
    return schema.Strips(
        kind="pair",
        title=pair.summary(),
        kicker=printable(f"{pair.left.name} | {pair.right.name}"),
        caption=" ".join([caption, *left_out, *even]),
        notes=tuple(dict.fromkeys(map(str, (pair.source, pair.other_source)))),
        unit=pair.unit,
        sides=sides,
        pairs=tuple(
            schema.PagePair(
                left=None if row.token is None else show_token(row.token),
                right=None if row.other_token is None else show_token(row.other_token),
                values=(row.value, row.other_value),
                difference=row.difference,
            )
            for row in rows
        ),
        columns=(pair.unit, sides[0].name, sides[1].name, "difference"),
        entries=tuple(
            schema.Entry(page=None, cells=(row.name(), row.value, row.other_value, row.difference))
            for row in rows
        ),
    )


def describe_intervention(result: Intervention) -> schema.Strips:
    """An intervention: what was changed, and rollout before and after.

    >>> import attnflow as af
    >>> result = af.intervene("verb-number", "the keys to the house", blank="keys")
    >>> describe_intervention(result).columns
    ('token', 'before', 'after', 'difference')
    """
    names = list(map(show_token, result.tokens))
    others = list(map(show_token, result.after.attention.tokens or names))
    model = printable(result.source.model or "")
    asides = find_excluded(("sinks", "special"), len(names), result)
    rows = result.by("rollout")
    shown = [
        tuple(None if math.isnan(share) else share for share in shares)
        for shares in pair_shares(share_rest(rows, asides))
    ]
    sides = [
        schema.PageSide(
            name=name,
            method="rollout",
            layer=outcome.attention.depth,
            model=model,
            prediction=describe_prediction(outcome.prediction),
            left_out=float(row.values[0, 0, list(asides)].sum()),
        )
        for name, outcome, row in zip(
            ("before", "after"), (result.before, result.after), rows, strict=True
        )
    ]
    left_out = ", ".join(names[at] for at in asides[:4]) + ", ..." * (len(asides) > 4)
    what = printable(result.change.describe(result.tokens))
    return schema.Strips(
        kind="pair",
        title=printable(result.summary()),
        kicker=what,
        caption=(
            f"Rollout at position {result.position}, top layer. Above: before the change. Below:"
            f" after ({what}). Blue: its share, one scale for both. Bars: after minus before, blue"
            " for more, orange for less."
            + (f" Left out, the rest sums to 1: {left_out}." if asides else "")
        ),
        notes=(str(result.source),),
        unit="token",
        sides=(sides[0], sides[1]),
        pairs=tuple(
            schema.PagePair(left=name, right=other, values=(before, after), difference=difference)
            for name, other, (before, after, difference) in zip(names, others, shown, strict=True)
        ),
        columns=("token", "before", "after", "difference"),
        entries=tuple(
            schema.Entry(page=None, cells=(name, *cells))
            for name, cells in zip(names, shown, strict=True)
        ),
    )


def pair_shares(shares: Floats) -> list[tuple[float, float, float]]:
    """(before, after, difference) of each token, from shares [before and after, token]."""
    before, after = shares
    return list(zip(before.tolist(), after.tolist(), (after - before).tolist(), strict=True))


def describe_side(side: Side) -> schema.PageSide:
    """One side."""
    return schema.PageSide(
        name=printable(side.name),
        method=printable(side.method),
        layer=side.layer,
        model=printable(side.explanation.model),
        prediction=describe_prediction(side.explanation.prediction),
        left_out=side.left_out,
    )


def name_side(side: Side) -> str:
    """A side with its method, model and layer."""
    model = f" of {side.explanation.model}" if side.explanation.model else ""
    return printable(f"{side.name} ({side.method}{model}, layer {side.layer})")
