"""One training loop for every model of the paper: measured, interruptible, resumed bit for bit.

A recipe makes a `TrainingTask` and calls `run_training`. The whole state of a run is one file,
so that a kill leaves the old one or the new one. It runs on the CPU, where sums have a fixed
order: the same seed and number of threads give the same weights.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from attnflow.core.io.files import write_file
from attnflow.errors import OptionError
from attnflow.models.execution import evaluating
from attnflow.paper.checkpoint import (
    LOG,
    Facts,
    Tensors,
    add_line,
    check_resumed_options,
    claim_folder,
    compute_checksum,
    digest,
    read_checkpoint,
    select_part,
    write_through,
)
from attnflow.paper.process import repeatable, stop_signal, training_bar

# steps; the moving average is shorter at first, or it would keep the random start
AVERAGE_WARM_UP = 10

TellLine = Callable[[str], None]  # takes one line of text
AnyBatch = TypeVar("AnyBatch")  # what a task learns from in one step


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """AdamW, its learning rate over the steps, and the clipping of gradients."""

    learning_rate: float
    weight_decay: float = 0.01  # of matrices only; biases and norms are left alone
    warm_up: float = 0.05  # the share of the steps in which the rate rises
    decay: Literal["linear", "cosine"] = "linear"  # how it falls to 0
    fall: float = 1.0  # the share of the steps after warm-up, at the end, over which it falls
    inertia: float = 0.999  # of the squared gradients, from step to step
    clip: float = 1.0  # the longest gradient

    def __post_init__(self) -> None:
        require("learning_rate", self.learning_rate, "above 0", self.learning_rate > 0)
        require("weight_decay", self.weight_decay, "0 or more", self.weight_decay >= 0)
        require("warm_up", self.warm_up, "from 0 to below 1", 0 <= self.warm_up < 1)
        require("decay", self.decay, "linear or cosine", self.decay in ("linear", "cosine"))
        require("fall", self.fall, "above 0, at most 1", 0 < self.fall <= 1)
        require("inertia", self.inertia, "from 0 to below 1", 0 <= self.inertia < 1)
        require("clip", self.clip, "above 0", self.clip > 0)

    def rate_at(self, step: int, steps: int) -> float:
        """The share of the learning rate in a step, counted from 0: up to 1, then towards 0.

        >>> optimiser = Optimiser(learning_rate=1.0, warm_up=0.5)
        >>> [round(optimiser.rate_at(step, 4), 2) for step in range(4)]
        [0.5, 1.0, 1.0, 0.5]
        """
        rise = self.warm_up * steps
        if step < rise:
            return min((step + 1) / rise, 1.0)
        left = min(1.0, (steps - step) / (self.fall * (steps - rise)))
        return left if self.decay == "linear" else (1 - math.cos(math.pi * left)) / 2


@dataclass(frozen=True, kw_only=True)
class TrainingTask(Generic[AnyBatch]):
    """A training, described by a recipe.

    `batch_at` must depend on nothing but the step (and the recipe's own seed): then a resumed run
    needs no iterator's state. `measure` finds the module in eval mode, without gradients, and with
    the moving average as its weights if there is one.
    """

    module: nn.Module
    steps: int  # planned; patience may end it sooner
    batch_at: Callable[[int], AnyBatch]
    loss: Callable[[AnyBatch], Tensor]  # a scalar
    measure: Callable[[], float]  # accuracy on dev
    every: int  # steps between two measurements, each followed by a checkpoint
    optimiser: Optimiser
    scale: Callable[[str], float] = lambda name: 1.0  # of the learning rate, by a parameter's name
    average: float | None = None  # the decay of the moving average, for example 0.999
    patience: int | None = None  # measurements without improvement before it stops
    # further facts that identify the run, as JSON: sizes, `digest` of the data
    options: Mapping[str, object] = field(default_factory=dict)
    title: str = "training"  # the first line of the log

    def __post_init__(self) -> None:
        require("steps", self.steps, "1 or more", self.steps >= 1)
        require("every", self.every, "1 or more", self.every >= 1)
        require(
            "average", self.average, "between 0 and 1", self.average is None or 0 < self.average < 1
        )
        require("patience", self.patience, "1 or more", self.patience is None or self.patience >= 1)

    def fingerprint(self, seed: int) -> dict[str, object]:
        """The facts that must match for a checkpoint to be resumed, as JSON returns them."""
        shapes = {
            name: [list(value.shape), str(value.dtype)]
            for name, value in list_weights(self.module).items()
        }
        scales = {name: self.scale(name) for name in list_trained(self.module)}
        own = {
            "seed": seed,
            "steps": self.steps,
            "every": self.every,
            "average": self.average,
            "patience": self.patience,
        }
        facts = {
            **self.options,
            **own,
            **asdict(self.optimiser),
            "model": digest(shapes),
            "rates": digest(scales),
        }
        as_read: dict[str, object] = json.loads(json.dumps(facts))
        return as_read


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    steps: int
    accuracy: float  # the best on dev, which is that of the saved weights
    seconds: float  # of all sittings


def run_training(
    task: TrainingTask[AnyBatch],
    folder: str | os.PathLike[str],
    *,
    seed: int,
    resume: bool,
    save: Callable[[nn.Module], object],
    report: TellLine | None = None,
) -> Outcome:
    """Train, give the module with the best weights to `save`, and remove the checkpoint.

    `save` writes into `folder`, model.safetensors last; training.log stands beside it. On Ctrl-C
    the step is finished, a checkpoint is written, and KeyboardInterrupt is raised; a second Ctrl-C
    stops at once.
    """
    checkpoint = claim_folder(Path(folder), resume)
    log = Path(folder) / LOG

    def note(line: str) -> None:
        add_line(log, line, first=task.title)
        if report is not None:
            report(line)

    with repeatable(seed), stop_signal() as stopped, training_bar(task.steps) as show:
        run = Run(task, seed)
        if resume:
            run.restore(checkpoint)
        while not run.finished:
            loss = run.take_step()
            show(run.step, loss, run.best_accuracy)
            if run.step % task.every == 0 or run.step == task.steps:
                line = run.measure()
                run.write(checkpoint)  # before the log, which is then never ahead of it
                note(line)
            if stopped():
                run.write(checkpoint)
                note(f"stopped at step {run.step} of {task.steps}; pass --resume to continue")
                raise KeyboardInterrupt
        load_weights(task.module, run.best)
        save(task.module.eval())
        add_line(log, f"finished after {run.seconds:.0f} s", first=task.title)
    with suppress(OSError):  # the model is whole: what cannot be removed does no harm
        checkpoint.unlink()
        checkpoint.parent.rmdir()
    return Outcome(run.step, run.best_accuracy, run.seconds)


class Run(Generic[AnyBatch]):
    """The state of a training: weights, their moving average, the optimiser, the best so far.

    A checkpoint holds all of it.
    """

    def __init__(self, task: TrainingTask[AnyBatch], seed: int) -> None:
        self.task = task
        self.fingerprint = task.fingerprint(seed)
        self.optimiser = make_adamw(task)
        self.average = copy_weights(task.module) if task.average is not None else {}
        self.best: Tensors = {}
        self.step = 0
        self.best_accuracy = -math.inf
        self.stale = 0  # measurements since the best one
        self.total_loss = 0.0  # since the last measurement
        self.summed = 0  # steps in total_loss
        self.earlier = 0.0  # seconds of earlier sittings
        self.start = time.monotonic()
        task.module.train()

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or patience has run out."""
        return self.step >= self.task.steps or (
            self.task.patience is not None and self.stale >= self.task.patience
        )

    @property
    def seconds(self) -> float:
        """How long it has taken so far, in all sittings."""
        return self.earlier + time.monotonic() - self.start

    def take_step(self) -> float:
        """Take one step on one batch; return the batch's loss."""
        task = self.task
        share = task.optimiser.rate_at(self.step, task.steps)
        for group in self.optimiser.param_groups:
            group["lr"] = group["full_rate"] * share
        loss = task.loss(task.batch_at(self.step))
        value = float(loss.detach())
        if not math.isfinite(value):
            raise OptionError(
                f"the loss must stay finite; got {value} at step {self.step + 1}: "
                "lower the learning rate"
            )
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(list_trained(task.module).values(), task.optimiser.clip)
        self.optimiser.step()
        self.step += 1
        self.total_loss += value
        self.summed += 1
        self.move_average()
        return value

    def move_average(self) -> None:
        """Move each averaged weight a little towards the current one; copy integer buffers."""
        if self.task.average is None:
            return
        decay = min(self.task.average, (1 + self.step) / (AVERAGE_WARM_UP + self.step))
        with torch.no_grad():
            for name, value in list_weights(self.task.module).items():
                if value.is_floating_point():
                    self.average[name].lerp_(value, 1 - decay)
                else:
                    self.average[name].copy_(value)

    def measure(self) -> str:
        """Measure accuracy on dev, and keep the best weights; return what to report."""
        module = self.task.module
        with evaluating(module), torch.no_grad(), holding(module, self.average):
            accuracy = float(self.task.measure())
            if accuracy > self.best_accuracy:
                self.best, self.best_accuracy, self.stale = copy_weights(module), accuracy, 0
            else:
                self.stale += 1
        loss = self.total_loss / self.summed
        self.total_loss, self.summed = 0.0, 0
        return (
            f"step {self.step} of {self.task.steps}: loss {loss:.4f}, "
            f"dev accuracy {accuracy:.4f} (best {self.best_accuracy:.4f})"
        )

    def write(self, path: Path) -> None:
        """Write all of it to one file: the tensors, and the rest in its metadata."""
        from safetensors.torch import save as to_bytes

        slots = self.optimiser.state_dict()["state"]
        moments = {
            f"{place}.{name}": value
            for place, slot in slots.items()
            for name, value in slot.items()
        }
        parts = {
            "now": list_weights(self.task.module),
            "average": self.average,
            "best": self.best,
            "optimiser": moments,
        }
        tensors = {
            f"{part}.{name}": value.detach().contiguous()
            for part, values in parts.items()
            for name, value in values.items()
        }
        tensors["random"] = torch.get_rng_state()
        facts: Facts = {
            "fingerprint": self.fingerprint,
            "step": self.step,
            "best_accuracy": self.best_accuracy if self.best else None,  # JSON has no infinity
            "stale": self.stale,
            "total_loss": self.total_loss,
            "summed": self.summed,
            "seconds": self.seconds,
            "checksum": compute_checksum(tensors),
        }
        data = to_bytes(tensors, {"attnflow": json.dumps(facts)})
        write_file(path, lambda file: write_through(file, data))

    def restore(self, path: Path) -> None:
        """Return to where a checkpoint was written."""
        tensors, facts = read_checkpoint(path)
        check_resumed_options(path, facts["fingerprint"], self.fingerprint)
        load_weights(self.task.module, select_part(tensors, "now"))
        self.average, self.best = select_part(tensors, "average"), select_part(tensors, "best")
        slots: dict[int, Tensors] = {}
        for name, value in select_part(tensors, "optimiser").items():
            place, slot = name.split(".")
            slots.setdefault(int(place), {})[slot] = value
        self.optimiser.load_state_dict(
            {"state": slots, "param_groups": self.optimiser.state_dict()["param_groups"]}
        )
        torch.set_rng_state(tensors["random"])
        self.step, self.stale = facts["step"], facts["stale"]
        self.total_loss, self.summed = facts["total_loss"], facts["summed"]
        self.earlier = facts["seconds"]
        self.best_accuracy = -math.inf if facts["best_accuracy"] is None else facts["best_accuracy"]


# ---- weights -------------------------------------------------------------------------------------


def list_weights(module: nn.Module) -> Tensors:
    """Parameters and buffers, by name; each once, even if it has two names."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def list_trained(module: nn.Module) -> Tensors:
    """The parameters that are not frozen, by name."""
    return {name: value for name, value in module.named_parameters() if value.requires_grad}


def copy_weights(module: nn.Module) -> Tensors:
    """Copies of a module's weights, by name."""
    return {name: value.detach().clone() for name, value in list_weights(module).items()}


def load_weights(module: nn.Module, weights: Tensors) -> None:
    """Copy weights into a module."""
    own = list_weights(module)
    with torch.no_grad():
        for name, value in weights.items():
            own[name].copy_(value)


@contextmanager
def holding(module: nn.Module, weights: Tensors) -> Iterator[None]:
    """A block in which the module has other weights; its own if none are given."""
    own = copy_weights(module) if weights else {}
    load_weights(module, weights)
    try:
        yield
    finally:
        load_weights(module, own)


def make_adamw(task: TrainingTask[AnyBatch]) -> torch.optim.Optimizer:
    """AdamW with one group per parameter, so that each has its own rate; only matrices decay."""
    full = task.optimiser.learning_rate
    decay = task.optimiser.weight_decay
    groups = [
        {
            "params": [value],
            "full_rate": full * task.scale(name),
            "weight_decay": decay if value.ndim > 1 else 0.0,
        }
        for name, value in list_trained(task.module).items()
    ]
    # fused: the same steps, nine times as fast as a loop over parameters
    return torch.optim.AdamW(groups, lr=full, betas=(0.9, task.optimiser.inertia), fused=True)


def require(name: str, value: object, rule: str, kept: bool) -> None:
    """Refuse a value that breaks a rule."""
    if not kept:
        raise OptionError(f"{name} must be {rule}; got {value}")
