"""Sanity: does a ranking change when the weights that it is about are randomised?

The check of Adebayo et al. (2018): a copy of the model loses its weights from the top, the head
first, then one block after another, and each time every method ranks the tokens again. A method
whose ranking stays the same says nothing about what the model has learned there.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from attnflow.analysis.evaluate.examples import Example
from attnflow.analysis.statistics import spearman, summarise
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.io.formatting import Panel, format_count
from attnflow.core.io.tables import Table
from attnflow.errors import CaptureError, OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.execution import evaluating, running
from attnflow.models.model import Model
from attnflow.progress import progress_bar

if TYPE_CHECKING:
    import torch

    from attnflow.analysis.evaluate.evaluate import Evaluation
    from attnflow.analysis.evaluate.scored_example import ScoredExample

EXAMPLES_TOGETHER = 32  # examples that are scored together


class SanityRow(NamedTuple):
    """How far the rankings of a method change when weights are randomised down to a stage."""

    method: str
    randomised: str
    mean: float
    std: float
    rankings: int
    undefined: int


@dataclass(frozen=True, eq=False, repr=False)
class Sanity(Table):
    """How far rankings change when a model's weights are randomised from the top.

    Parameters
    ----------
    stages
        What was randomised last: "head", then the layers from the top; what stands before it is
        randomised too.
    correlations
        [seed, stage, example] for each method: Spearman's correlation of its ranking with the one
        on the intact model; NaN where one of them ranks nothing.
    layer
        The layer of the token attention.
    seeds
        Of the random weights.
    special_tokens
        Whether CLS, SEP and the like were ranked.

    >>> import attnflow as af
    >>> found = af.evaluate("verb-number", ["the key to the old cabinets"], sanity=True).sanity
    >>> found.stages
    ('head', 'layer 6', 'layer 5', 'layer 4', 'layer 3', 'layer 2', 'layer 1')
    >>> found.mean("rollout", "head")    # attention does not depend on the head
    1.0
    """

    columns: ClassVar = SanityRow._fields

    stages: tuple[str, ...]
    correlations: dict[str, Floats]
    layer: int
    seeds: tuple[int, ...]
    special_tokens: bool = False

    def __repr__(self) -> str:
        count = next(iter(self.correlations.values())).shape[2]
        names = ", ".join(self.correlations)
        examples = format_count(count, "example")
        return f"<Sanity: {names}, {examples}, randomised down to {self.stages[-1]}>"

    def rows(self) -> Iterator[SanityRow]:
        """(method, last stage, mean, standard deviation, rankings, how many are undefined)."""
        for method, values in self.correlations.items():
            for place, stage in enumerate(self.stages):
                yield SanityRow(method, stage, *summarise(values[:, place].ravel()))

    def mean(self, method: str, stage: str | None = None) -> float:
        """The mean correlation of a method's rankings with those on the intact model.

        Parameters
        ----------
        method
            Its name, as in the report.
        stage
            One of `stages`; the last, where everything is randomised, if None.
        """
        stage = self.stages[-1] if stage is None else stage
        for row in self.rows():
            if (row.method, row.randomised) == (method, stage):
                return row.mean
        raise OptionError(
            f"no sanity of {method} at {stage}; it has {', '.join(self.correlations)}"
            f" at {', '.join(self.stages)}"
        )

    def _panels(self) -> Iterator[Panel]:
        """Methods down, stages across, mean ± standard deviation."""
        rows = list(self.rows())
        cells = []
        for method in self.correlations:
            own = [row for row in rows if row.method == method]
            means = [f"{row.mean:.2f} ± {row.std:.2f}" for row in own]
            cells.append([method, *means, str(max(row.undefined for row in own))])
        count = next(iter(self.correlations.values())).shape[2]
        kept = "ranked" if self.special_tokens else "left out"
        seeds = "seeds" if len(self.seeds) > 1 else "seed"
        caption = (
            "Spearman correlation with the ranking on the intact model, weights randomised from the"
            f" top down to (layer {self.layer}; n = {count}; special tokens {kept};"
            f" {seeds} {', '.join(map(str, self.seeds))})"
        )
        yield Panel(["method", *self.stages, "undefined"], cells, caption)


def read_seeds(sanity: object) -> tuple[int, ...]:
    """The seeds of a sanity check: none for False, 0 for True, or those of a list."""
    if isinstance(sanity, bool):
        return (0,) if sanity else ()
    if not isinstance(sanity, Sequence) or isinstance(sanity, str) or not len(sanity):
        raise OptionError(f"sanity must be True, False or a list of seeds; got {sanity!r}")
    seeds = tuple(dict.fromkeys(check_integers(sanity, "seeds of sanity")))
    if min(seeds) < 0:
        raise OptionError(f"seeds of sanity must not be negative; got {min(seeds)}")
    return seeds


def measure_sanity(
    evaluation: "Evaluation",
    done: "Sequence[ScoredExample]",
    examples: Sequence[Example],
    seeds: Sequence[int],
    special_tokens: bool,
) -> Sanity:
    """Rank tokens by an evaluation's methods while the weights of a copy are randomised in stages.

    done: the examples as they were scored. The watched class and its foil stay those of the intact
    model.
    """
    top = max(evaluation.layers)
    place = evaluation.layers.index(top)
    watched = [
        replace(example, target=scored.target, foil=scored.foil_number)
        for example, scored in zip(examples, done, strict=True)
    ]
    kept = [example.keep(special_tokens) for example in done]
    found: dict[str, list[list[float]]] = {name: [] for name in evaluation.method_names}
    stages: tuple[str, ...] = ()
    with evaluation.timed("sanity"), progress_bar("randomising weights") as tick:
        for number, seed in enumerate(seeds):
            copy = copy_model(evaluation.model)  # one is in memory at a time
            parts = list_stages(copy, examples[0].encoded)
            stages = tuple(parts)
            for stage, modules in enumerate(parts.values()):
                randomise_weights(modules, seed * 1000 + stage)
                scored = score_again(evaluation, copy, top, watched)
                for name, rows in found.items():
                    pairs = zip(scored, done, kept, strict=True)
                    rows.append(
                        [
                            spearman(new[name][:, ranked], old.scores[name][place, ranked])[0]
                            for new, old, ranked in pairs
                        ]
                    )
                tick(number * len(parts) + stage + 1, len(seeds) * len(parts))
            del copy, parts, modules
    shape = (len(seeds), len(stages), len(done))
    correlations = {name: np.array(rows).reshape(shape) for name, rows in found.items()}
    return Sanity(stages, correlations, top, tuple(seeds), special_tokens)


def score_again(
    evaluation: "Evaluation", model: Model, layer: int, examples: Sequence[Example]
) -> list[dict[str, Floats]]:
    """[1, token] of each example by the methods of an evaluation, for another model and layer."""
    job = replace(evaluation.job, importance={}, layers=(layer,))
    again = replace(
        evaluation, model=model, job=job, scorers={}, yardsticks=None, layers=(), seconds={}
    )
    scored = []
    for start in range(0, len(examples), EXAMPLES_TOGETHER):
        scored += again.score(examples[start : start + EXAMPLES_TOGETHER])
    return [example.scores for example in scored]


# ---- weights ------------------------------------------------------------------------------------


def copy_model(model: Model) -> Model:
    """A copy of a model whose weights may be changed."""
    try:
        module = deepcopy(model.model)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        line = " ".join(str(error).split())[:200]
        raise CaptureError(
            f"{model.name} cannot be copied, so that its weights cannot be randomised: {line}"
        ) from error
    return Model(
        module,
        model.image_processor if model.tokenizer is None else model.tokenizer,
        task=model.task,
        position=model.position,
        origin=model.origin,
    )


def find_blocks(module: "torch.nn.Module", name: str) -> "dict[str, torch.nn.Module]":
    """The blocks of a model by name, from the bottom: the items of its outermost lists."""
    import torch

    blocks: dict[str, torch.nn.Module] = {}
    lists: list[str] = []
    for path, part in module.named_modules():
        if not isinstance(part, torch.nn.ModuleList) or path.startswith(tuple(lists)):
            continue
        # unlike heads or embeddings, which lists may hold too, blocks contain modules
        if len(part) and all(next(item.children(), None) is not None for item in part):
            lists.append(f"{path}.")
            blocks |= {f"{path}.{number}": item for number, item in enumerate(part)}
    if not blocks:
        raise CaptureError(f"{name} has no list of blocks whose weights could be randomised")
    return blocks


def list_stages(model: Model, encoded: Encoded) -> "dict[str, list[torch.nn.Module]]":
    """The modules to randomise by stage, in order: the head, then the blocks from the top.

    The head consists of the modules that run after the last block.
    """
    import torch

    blocks = find_blocks(model.model, model.name)
    inside = {part for block in blocks.values() for part in block.modules()}
    order: list[torch.nn.Module] = []
    with ExitStack() as hooks, torch.no_grad(), evaluating(model.model), running(model):
        for part in model.model.modules():
            if part in inside or next(part.parameters(recurse=False), None) is not None:
                hooks.callback(
                    part.register_forward_pre_hook(lambda own, _: order.append(own)).remove
                )
        model.model(**model.batch([encoded]))
    last = max(place for place, part in enumerate(order) if part in inside)
    head = [part for part in dict.fromkeys(order[last + 1 :]) if part not in order[:last]]
    names = [f"layer {number}" for number in range(1, len(blocks) + 1)]
    if len(blocks) != model.depth:  # shared blocks, or two lists
        names = list(blocks)
    layers = {
        name: list(block.modules()) for name, block in zip(names, blocks.values(), strict=True)
    }
    first = {"head": head} if head else {}
    return first | dict(reversed(layers.items()))


def randomise_weights(modules: "Sequence[torch.nn.Module]", seed: int) -> None:
    """Draw new weights from a normal distribution with the mean and spread of the old ones.

    Parameters are replaced, so that a head that shares its weights with the embeddings leaves the
    embeddings unchanged.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    for module in modules:
        for name, weight in list(module.named_parameters(recurse=False)):
            if not weight.is_floating_point():
                continue
            spread, mean = torch.std_mean(weight.detach().float().cpu(), correction=0)
            drawn = mean + spread * torch.randn(weight.shape, generator=generator)
            fresh = drawn.to(weight.device, weight.dtype)
            setattr(module, name, torch.nn.Parameter(fresh, requires_grad=weight.requires_grad))
