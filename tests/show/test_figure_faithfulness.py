"""Curves of deletion and insertion: the means that are drawn, the forms, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

import attnflow as af
from attnflow import figures

TEXTS = ["the key to the cabinets", "the old keys", "the men near the house", "keys"]


@pytest.fixture(scope="module")
def report() -> af.Report:
    return af.evaluate(
        af.load("verb-number"),
        TEXTS,
        methods=["raw", "rollout"],
        layers=[1, 6],
        against=(),
        scorers={"_mine": lambda text: af.load("verb-number").encode(text).ids},
        faithfulness=["deletion", "insertion"],
        replacement=["unknown", "removal"],
        best=True,
    )


@pytest.mark.parametrize(("layer", "place"), [(None, 1), (1, 0)])
def test_lines_are_means_over_examples_at_shares_of_their_tokens(
    report: af.Report, layer: int | None, place: int
) -> None:
    drawing = figures.deletion_curves(report, layer=layer, replacement="removal")
    assert list(drawing.artists) == ["deletion", "insertion"]
    names = ["raw", "rollout", "_mine", "random order", "best found"]
    for side, drawn in enumerate(drawing.artists.values()):
        assert list(drawn) == names
        for name in names:
            rows = []
            for example in report.examples[:3]:  # the last one has nothing to order
                curves = example.faithful[1].curves[name]
                steps = curves[place if len(curves) > 1 else 0, side]
                rows.append(np.interp(np.linspace(0, len(steps) - 1, 21), range(len(steps)), steps))
            line, shade = drawn[name]
            np.testing.assert_allclose(line.get_ydata(), np.mean(rows, axis=0))
            np.testing.assert_allclose(line.get_xdata(), np.linspace(0, 100, 21))
            half = np.std(rows, axis=0) / 3**0.5
            corners = shade.get_paths()[0].vertices[:, 1]
            assert corners.max() == pytest.approx((np.mean(rows, axis=0) + half).max())
            assert corners.min() == pytest.approx((np.mean(rows, axis=0) - half).min())


def test_a_report_of_deletion_alone_has_one_panel_and_is_written_in_every_form(
    tmp_path: Path,
) -> None:
    found = af.evaluate(
        af.load("verb-number"), TEXTS[:2], layers=6, against=(), faithfulness="comprehensiveness"
    )
    drawing = figures.deletion_curves(found, band="std")
    assert list(drawing.artists) == ["deletion"]
    for ending in ("png", "svg", "pdf"):
        assert drawing.save(tmp_path / f"curves.{ending}").stat().st_size > 1000
    text = (tmp_path / "curves.svg").read_text()
    assert "layer 6; replacement: unknown" in text
    assert "standard deviation, n = 2" in text


def test_curves_go_into_axes_of_the_users(report: af.Report) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots(1, 2)
    assert figures.deletion_curves(report, axes=axes).axes == tuple(axes)
    with pytest.raises(af.OptionError):
        figures.deletion_curves(report, axes=axes[:1])


def test_what_cannot_be_drawn_is_refused(report: af.Report) -> None:
    plain = af.evaluate(af.load("verb-number"), TEXTS[:1], layers=6, against="blank_out")
    with pytest.raises(af.OptionError, match="where faithfulness was measured"):
        figures.deletion_curves(plain)
    with pytest.raises(af.OptionError, match="no layer 3; it has 1, 6"):
        figures.deletion_curves(report, layer=3)
    with pytest.raises(af.OptionError, match="no replacement 'mask'"):
        figures.deletion_curves(report, replacement="mask")
    with pytest.raises(af.OptionError, match="unknown band 'min'"):
        figures.deletion_curves(report, band="min")
    with pytest.raises(af.OptionError, match="draws what evaluate gives; got int"):
        figures.deletion_curves(3)  # type: ignore[arg-type]
    lone = af.evaluate(
        af.load("verb-number"), ["keys"], layers=6, against=(), faithfulness="deletion"
    )
    with pytest.raises(af.OptionError, match="every example is undefined"):
        figures.deletion_curves(lone)


def test_scorers_alone_are_drawn_without_a_layer() -> None:
    found = af.evaluate(
        af.load("verb-number"),
        TEXTS[:2],
        methods=[],
        against=(),
        scorers={"mine": lambda text: af.load("verb-number").encode(text).ids},
        faithfulness="deletion",
    )
    drawn = figures.deletion_curves(found).artists["deletion"]
    assert list(drawn) == ["mine", "random order"]
