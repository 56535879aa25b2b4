"""The data of the page of two explanations side by side."""

from attnflow.analysis.explain.compare import Side, SideBySide
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
