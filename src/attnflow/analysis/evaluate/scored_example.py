"""`ScoredExample`: one example of a report, with all its scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnflow.analysis.evaluate.yardsticks import Faithful
from attnflow.analysis.faithfulness.plausibility import Marks
from attnflow.core.arrays import Floats


@dataclass(frozen=True, eq=False)
class ScoredExample:
    """One example with all its scores."""

    text: Any  # an input as it was given; the text of a chat
    label: str  # the target of its importance: the label, or the prediction if it has none
    tokens: tuple[str, ...]
    special: tuple[bool, ...]  # CLS, SEP and the like
    scores: dict[str, Floats]  # by method: [layer, token]; by scorer: [1, token]
    importance: dict[str, Floats]  # by name: [token]
    removed: tuple[int, ...] = ()  # positions that the graph was made without
    faithful: tuple[Faithful, ...] = ()  # one per replacement
    rationale: Marks | None = None  # [token]: which are marked
    target: int | None = None  # the number of the class that was watched
    foil: str | None = None  # the class that it was contrasted with, if any
    foil_number: int | None = None

    def keep(self, special_tokens: bool) -> Marks:
        """[token]: which tokens are ranked."""
        kept = np.ones(len(self.tokens), bool) if special_tokens else ~np.array(self.special, bool)
        kept[list(self.removed)] = False
        return kept

    def describe(self, correlations: dict[str, list[float]]) -> dict[str, object]:
        """The example for JSON, with its correlations by layer."""
        content: dict[str, object] = {
            "text": self.text if isinstance(self.text, str) else repr(self.text),
            "label": self.label,
            **({} if self.foil is None else {"foil": self.foil}),
            "tokens": self.tokens,
            "special": self.special,
            "scores": {name: values.tolist() for name, values in self.scores.items()},
            "importance": {name: values.tolist() for name, values in self.importance.items()},
            "correlation": correlations,
        }
        if self.rationale is not None:
            content["rationale"] = self.rationale.astype(int).tolist()
        if self.faithful:
            content["faithfulness"] = [
                {
                    "replacement": each.replacement,
                    "values": {
                        metric: {method: row.tolist() for method, row in rows.items()}
                        for metric, rows in each.values.items()
                    },
                    "curves": {method: rows.tolist() for method, rows in each.curves.items()},
                }
                for each in self.faithful
            ]
        return content
