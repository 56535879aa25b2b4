"""`Intervention`: a prediction and its attention before and after a change inside the model."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, ClassVar, NamedTuple

import numpy as np

from attnflow.analysis.intervene.change import ReadChange
from attnflow.core.arrays import Floats
from attnflow.core.attention import Attention
from attnflow.core.choices import Method, read_methods, run_method
from attnflow.core.io.files import PICTURES, Writer
from attnflow.core.io.formatting import Panel
from attnflow.core.io.tables import Table
from attnflow.core.provenance import Source
from attnflow.core.results import TokenAttention
from attnflow.core.sinks import Sink, sinks
from attnflow.core.text import show_token
from attnflow.errors import OptionError
from attnflow.models.predict import Prediction


class InterventionRow(NamedTuple):
    """The shares of one token before and after."""

    key: int
    token: str
    blanked: bool
    before: float
    after: float
    difference: float


class RunOutcome(NamedTuple):
    """One run of the model.

    Parameters
    ----------
    prediction
        The prediction, with the target that is watched and its probability; None for a model
        without prediction.
    logit
        The logit of the target.
    attention
        The attention, heads fused to the mean of those that attend. A row that lost every key is
        the identity: the residual connection alone is left.
    continuation
        The tokens that the model generates next; none if it was not asked to.
    text
        The same as text; empty without a tokenizer.
    """

    prediction: Prediction | None
    logit: float | None
    attention: Attention
    continuation: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True, eq=False)
class Intervention(Table):
    """A prediction, and the attention behind it, before and after a change inside the model.

    It is also a table of rollout at the position of the prediction, one row per token: its share
    before and after.

    Parameters
    ----------
    before, after
        The two runs of the model.
    change
        What was changed: `.blanked` positions, `.cut` edges, `.heads_off`, and `.residual_share`,
        the share of a minimum cut's capacity that the residual connection holds, which is not cut.
    position
        The position of the prediction, in the attention graph.
    special
        Whether each token was added by the tokenizer: CLS, SEP and the like.
    source
        Where the result came from.

    >>> from attnflow import intervene
    >>> result = intervene("verb-number", "the keys to the cabinet", blank="keys")
    >>> result
    <Intervention: keys blanked, 'plural' 0.976 -> 0.484, the answer changes>
    """

    columns: ClassVar = InterventionRow._fields

    before: RunOutcome
    after: RunOutcome
    change: ReadChange
    position: int
    special: tuple[bool, ...]
    source: Source

    @property
    def probability_change(self) -> float | None:
        """The probability of the target after the change, minus that before it."""
        before, after = self.before.prediction, self.after.prediction
        if before is None or after is None:
            return None
        return after.target.probability - before.target.probability

    @property
    def logit_change(self) -> float | None:
        """The logit of the target after the change, minus that before it.

        With a foil, the change of the difference of the two logits.
        """
        before, after = self.before, self.after
        if before.prediction is None or after.prediction is None:
            return None
        if before.prediction.difference is not None and after.prediction.difference is not None:
            return after.prediction.difference - before.prediction.difference
        if before.logit is None or after.logit is None:
            return None
        return after.logit - before.logit

    @property
    def flips(self) -> bool:
        """Whether the answer, the most probable class or token, is another one."""
        before, after = self.before.prediction, self.after.prediction
        return before is not None and after is not None and before.label != after.label

    def by(
        self, method: str | Method = "rollout", *, layer: int | None = None
    ) -> tuple[TokenAttention, TokenAttention]:
        """Token attention at the position of the prediction, before and after.

        Parameters
        ----------
        method
            "raw", "rollout", "flow" or a user-defined method.
        layer
            The layer that is explained; the top one if None.

        >>> from attnflow import intervene
        >>> before, after = intervene("verb-number", "the keys", blank="keys").by("raw", layer=1)
        >>> before.values.shape
        (1, 1, 3)
        """
        chosen = read_methods(method)
        if len(chosen) != 1:
            raise OptionError(f"one method is shown at a time; got {', '.join(chosen)}")
        ((name, compute),) = chosen.items()
        before, after = (
            run_method(
                name,
                compute,
                each.attention.graph(),
                layers=[each.attention.depth if layer is None else layer],
                positions=[self.position],
                normalize="sum",
            )
            for each in (self.before, self.after)
        )
        return before, after

    def summary(self) -> str:
        """What was changed and what it did, in a sentence.

        >>> from attnflow import intervene
        >>> print(intervene("verb-number", "the keys to the cabinet", blank="keys").summary())
        keys blanked: plural 0.98 before, 0.48 after; the answer is now singular 0.52.
        """
        what = self.change.describe(self.tokens)
        before, after = self.before.prediction, self.after.prediction
        if before is None or after is None:
            return f"{what}."
        target = before.target
        text = (
            f"{what}: {show_token(target.label)} {target.probability:.2f} before,"
            f" {after.target.probability:.2f} after"
        )
        if before.difference is not None and before.foil is not None and self.logit_change:
            text += f", logit over {show_token(before.foil.label)} {self.logit_change:+.2f}"
        kept = f"the answer is now {show_token(after.label)} {after.probability:.2f}"
        text += f"; {kept if self.flips else 'the answer stays'}"
        if self.after.continuation:
            before_and_after = [
                run.text or " ".join(run.continuation) for run in (self.before, self.after)
            ]
            text += "; it goes on {1!r} instead of {0!r}".format(*before_and_after)
        share = self.change.residual_share
        if share is not None:
            text += f"; {share:.0%} of the cut is the residual connection's, which is not cut"
        return f"{text}."

    @property
    def tokens(self) -> tuple[str, ...]:
        """The names of the positions."""
        attention = self.before.attention
        if attention.tokens is None:
            return tuple(map(str, range(attention.size)))
        return attention.tokens

    @cached_property
    def sinks(self) -> tuple[Sink, ...]:
        """The sinks of the attention before the change."""
        return sinks(self.before.attention)

    def rows(self) -> Iterator[InterventionRow]:
        """One (key, token, blanked, before, after, difference) per token, by rollout."""
        shares = [row.values[0, 0].tolist() for row in self.by("rollout")]
        for key, (token, before, after) in enumerate(zip(self.tokens, *shares, strict=True)):
            blanked = key in self.change.blanked
            yield InterventionRow(key, token, blanked, before, after, after - before)

    def _panels(self) -> Iterator[Panel]:
        rows = [(row.key, row.token, row.before, row.after, row.difference) for row in self.rows()]
        header = ("key", "token", "before", "after", "difference")
        note = "rollout at the position of the prediction, top layer"
        yield Panel(header, rows, caption=self.summary(), note=note)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a page, a picture of both rows, or numbers, by the ending of the file's name.

        Parameters
        ----------
        path
            A file that ends in .html, .png, .svg, .pdf, .csv, .json, .md or .tex.
        """
        if os.fspath(path).lower().endswith(PICTURES):
            from attnflow.show.figures.intervention import intervention

            return intervention(self).save(path)
        return super().save(path)

    def _writers(self) -> dict[str, Writer]:
        return {".html": self._write_page, **super()._writers()}

    def _write_page(self, file: IO[bytes]) -> None:
        from attnflow.analysis.page.strips import describe_intervention
        from attnflow.show.page.page import fill_strips

        file.write(fill_strips(describe_intervention(self)).encode(errors="backslashreplace"))

    def _content(self) -> dict[str, object]:
        outcomes = {}
        for name, each in (("before", self.before), ("after", self.after)):
            prediction = each.prediction
            outcomes[name] = (
                None
                if prediction is None
                else {
                    "label": prediction.label,
                    "probability": prediction.probability,
                    "target": prediction.target.label,
                    "target_probability": prediction.target.probability,
                    "logit": each.logit,
                    "foil": None if prediction.foil is None else prediction.foil.label,
                    "difference": prediction.difference,
                }
            )
        return {**outcomes, "change": self.change._asdict(), **super()._content()}

    def __repr__(self) -> str:
        what = self.change.describe(self.tokens)
        before, after = self.before.prediction, self.after.prediction
        if before is None or after is None:
            return f"<Intervention: {what}>"
        target = before.target
        answer = "the answer changes" if self.flips else "the answer stays"
        return (
            f"<Intervention: {what}, {target.label!r} {target.probability:.3f} ->"
            f" {after.target.probability:.3f}, {answer}>"
        )


def share_rest(rows: Sequence[TokenAttention], excluded: Sequence[int]) -> Floats:
    """[row, token]: the shares of one position each; NaN where excluded, the rest sums to 1."""
    shares: Floats = np.stack([row.values[0, 0] for row in rows]).astype(np.float64)
    shares[:, list(excluded)] = np.nan
    rest = np.nansum(shares, axis=1, keepdims=True)
    shares /= np.where(rest > 0, rest, 1.0)
    return shares
