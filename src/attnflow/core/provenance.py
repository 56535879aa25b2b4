"""`Source`: the origin of a result, saved with it."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version

LIBRARIES = ("attnflow", "numpy")
MODEL_LIBRARIES = ("torch", "transformers")  # if they have been imported


@cache
def read_versions(libraries: Iterable[str]) -> dict[str, str]:
    """The installed version of each library, or "unknown"."""
    installed = {}
    for library in libraries:
        try:
            # of attnflow the version of the running code, which may not be installed
            own = getattr(sys.modules.get("attnflow"), "__version__", None)
            installed[library] = own if library == "attnflow" and own else version(library)
        except PackageNotFoundError:
            installed[library] = "unknown"
    return installed


def list_versions() -> Mapping[str, str]:
    """The versions of the libraries in use."""
    in_use = tuple(library for library in MODEL_LIBRARIES if library in sys.modules)
    return dict(read_versions((*LIBRARIES, *in_use)))


@dataclass(frozen=True)
class Source:
    """The origin of a result.

    Parameters
    ----------
    model
        The name of the model; None for weights without a model.
    fingerprint
        A digest of the model's configuration, vocabulary and weights: of some values of every
        weight if it begins with "quick-"; of all of them, with 64 digits, in a corpus.
    versions
        The versions of the libraries that computed it.
    method, edges, target, residual
        The method, the edge weight, the class that gradients watched, and the weight of the
        residual connection (None: inside the edges). None if it does not apply.
    heads
        How heads were fused: "mean", "max", "min", the number of one head, or the name of a
        function; None without heads.

    >>> str(Source("verb-number", "0a1b2c3d", {"attnflow": "0.3"}, method="rollout", residual=0.5))
    'verb-number 0a1b2c3d, rollout, residual 0.5, attnflow 0.3'
    >>> str(Source("verb-number", versions={}, method="flow", heads="max"))
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
        """The same with another method; faster than `replace`, as every result needs one.

        Parameters
        ----------
        method
            The name of the method.
        """
        named = object.__new__(Source)
        named.__dict__.update(self.__dict__, method=method)
        return named

    def to_dict(self) -> dict[str, object]:
        """All fields by their names, ready for JSON."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**content, "versions": dict(self.versions)}

    def to_json(self) -> str:
        """The same as one line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "Source":
        """Parse the output of `to_json`; unknown fields are ignored.

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
