"""`Source`: where a result came from, as every saved result says it."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

LIBRARIES = ("attnflow", "numpy")  # these make every number ...
MODEL_LIBRARIES = ("torch", "transformers")  # ... and these, once they are imported, the weights


@cache
def read_versions(libraries: Iterable[str]) -> dict[str, str]:
    """The installed versions by library, "unknown" for one without a version."""
    installed = {}
    for library in libraries:
        try:
            installed[library] = version(library)
        except PackageNotFoundError:
            installed[library] = "unknown"
    return installed


def list_versions() -> Mapping[str, str]:
    """The versions of the libraries that are in use."""
    in_use = tuple(library for library in MODEL_LIBRARIES if library in sys.modules)
    return dict(read_versions((*LIBRARIES, *in_use)))


@dataclass(frozen=True)
class Source:
    """Where a result came from.

    Parameters
    ----------
    model
        The model's name; None for weights that a user gave.
    fingerprint
        A digest of the model's configuration, vocabulary and weights. One that begins with
        "quick-" looked at some values of every weight; a corpus has a whole one, 64 digits.
    versions
        The versions of the libraries that made it.
    method, edges, target, residual
        What was computed: the method, what an edge weighs, the class that was watched, and the
        weight of the residual connection (None: inside the edges). None where it does not apply.
    heads
        How heads were fused: "mean", "max", "min", one head's number, or the name of a function;
        None where there were none to fuse.

    >>> str(Source("verb-number", "0a1b2c3d", {"attnflow": "0.3"}, method="rollout", residual=0.5))
    'verb-number 0a1b2c3d, rollout, residual 0.5, attnflow 0.3'
    >>> str(Source("verb-number", versions={}, method="flow", heads="max"))    # the mean is silent
    'verb-number, flow, heads max'
    """

    model: str | None = None
    fingerprint: str | None = None
    versions: Mapping[str, str] = field(default_factory=list_versions)
    method: str | None = None
    edges: str | None = None
    target: str | None = None
    residual: float | None = None
    heads: str | None = None

    def by_method(self, method: str) -> "Source":
        """The same for a result of this method; quicker than `replace`, as there is one per row.

        Parameters
        ----------
        method
            The name of the method.
        """
        named = object.__new__(Source)
        named.__dict__.update(self.__dict__, method=method)
        return named

    def to_dict(self) -> dict[str, Any]:
        """All fields by their names, ready for JSON."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**content, "versions": dict(self.versions)}

    def to_json(self) -> str:
        """The same as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Source":
        """Parse what `to_json` wrote; unknown fields are ignored.

        Parameters
        ----------
        text
            One object in JSON.
        """
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ValueError(f"a source must be a JSON object; got {type(content).__name__}")
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in content.items() if name in known})

    def __str__(self) -> str:
        parts = [
            " ".join(text for text in (self.model, self.fingerprint) if text),
            self.method,
            self.edges and f"{self.edges} edges",
            self.target and f"target {self.target}",
            None if self.residual is None else f"residual {self.residual:g}",
            None if self.heads in (None, "mean") else f"heads {self.heads}",
            *(f"{library} {used}" for library, used in self.versions.items()),
        ]
        return ", ".join(part for part in parts if part)
