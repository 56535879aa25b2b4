"""`ScoredExample`: one example of a report, with all that was computed of it."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from attnflow.analysis.rationales import Marks
from attnflow.analysis.yardsticks import Faithful
from attnflow.core.arrays import Floats


@dataclass(frozen=True, eq=False)
class ScoredExample:
    """One example with all its scores."""

    text: Any
    label: str  # the target of its importance: the label that was given, else the prediction
    tokens: tuple[str, ...]
    special: tuple[bool, ...]  # CLS, SEP and the like
    scores: dict[str, Floats]  # by method: [layer, token]; by scorer: [1, token]
    importance: dict[str, Floats]  # by name: [token]
    removed: tuple[int, ...] = ()  # positions that the graph was made without
    faithful: tuple[Faithful, ...] = ()  # one per replacement
    rationale: Marks | None = None  # [token]: which are marked

    def keep(self, special_tokens: bool) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """[token]: which tokens are ranked."""
        kept = np.ones(len(self.tokens), bool) if special_tokens else ~np.array(self.special, bool)
        kept[list(self.removed)] = False
        return kept

    def describe(self, correlations: dict[str, Any]) -> dict[str, Any]:
        """The example for JSON, with its correlations."""
        content = {
            "text": self.text if isinstance(self.text, str) else repr(self.text),
            "label": self.label,
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
