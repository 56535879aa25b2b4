"""The data of the pages of two rows: explanations side by side, and interventions."""

from attnflow.analysis.explain.compare import Side, SideBySide
from attnflow.analysis.intervene.intervention import Intervention
from attnflow.analysis.page import schema
from attnflow.analysis.page.page import describe_prediction
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
    rows = list(result.rows())
    names = [show_token(row.token) for row in rows]
    others = list(map(show_token, result.after.attention.tokens or names))
    model = printable(result.source.model or "")
    sides = [
        schema.PageSide(
            name=name,
            method="rollout",
            layer=outcome.attention.depth,
            model=model,
            prediction=describe_prediction(outcome.prediction),
            left_out=0.0,
        )
        for name, outcome in (("before", result.before), ("after", result.after))
    ]
    what = printable(result.change.describe(result.tokens))
    return schema.Strips(
        kind="pair",
        title=printable(result.summary()),
        kicker=what,
        caption=(
            f"Rollout at position {result.position}, top layer. Above: before the change. Below:"
            f" after ({what}). Blue: its share, one scale for both. Bars: after minus before, blue"
            " for more, orange for less."
        ),
        notes=(str(result.source),),
        unit="token",
        sides=(sides[0], sides[1]),
        pairs=tuple(
            schema.PagePair(
                left=name, right=other, values=(row.before, row.after), difference=row.difference
            )
            for name, other, row in zip(names, others, rows, strict=True)
        ),
        columns=("token", "before", "after", "difference"),
        entries=tuple(
            schema.Entry(page=None, cells=(name, row.before, row.after, row.difference))
            for name, row in zip(names, rows, strict=True)
        ),
    )


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
