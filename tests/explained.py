"""Explanations with other results than they were computed with, for tests of what shows them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import attnflow as af
from attnflow.analysis.run import MethodRun


def with_results(
    explanation: af.Explanation, results: Mapping[str, af.TokenAttention], **others: Any
) -> af.Explanation:
    """The explanation with these results instead; methods and graphs stay with known names."""
    runs = {}
    for name, result in results.items():
        known = explanation.runs.get(name)
        method = af.METHODS.get(name, af.rollout) if known is None else known.method
        graph = None if known is None else known.graph
        runs[name] = MethodRun(name, result.edges, method, graph, result)
    return replace(explanation, runs=runs, **others)
