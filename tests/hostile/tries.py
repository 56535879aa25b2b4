"""What all kinds share.

A try is drawn from its kind, seed and number, and runs in a process that may crash, hang or fill
the memory.
"""

import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import attnflow as af

CORES = 2
MEMORY = 8 * 2**30  # bytes of address space for one process, beyond which is MemoryError
FORK = multiprocessing.get_context("fork")  # torch and the compiled kernels come along

Attempt = Callable[[random.Random, int, Path], str | None]  # what was bad, if anything


@dataclass(frozen=True)
class Result:
    """How one kind of attack ended."""

    tries: int
    bad: tuple[str, ...]  # one line for each bad try: its number and what happened

    @property
    def clean(self) -> int:
        """The tries that ended as they should."""
        return self.tries - len(self.bad)


def draw_from(kind: str, seed: int, number: int) -> random.Random:
    """The source of everything that is random in one try."""
    return random.Random(f"{kind} {seed} {number}")


def run_tries(
    attempt: Attempt,
    kind: str,
    numbers: Sequence[int],
    seed: int,
    folder: Path,
    *,
    seconds: float = 30.0,
    memory: int | None = MEMORY,
) -> Result:
    """Every try on both cores, in forks that are replaced when they crash or take too long."""
    compile_kernels()
    todo = list(reversed(numbers))
    bad: dict[int, str] = {}
    crew: list[Worker] = []
    try:
        while todo or any(worker.busy for worker in crew):
            crew = [worker for worker in crew if worker.process.is_alive() or worker.busy]
            while len(crew) < min(CORES, len(numbers)):
                crew.append(Worker(attempt, kind, seed, folder, memory))
            for worker in crew:
                if todo and not worker.busy:
                    worker.start(todo.pop(), seconds)
            for worker in [worker for worker in crew if worker.busy]:
                if (complaint := worker.answer(pause=0.5 / CORES)) is not None:
                    if complaint:
                        bad[worker.number] = complaint
                    worker.busy = False
    finally:
        for worker in crew:
            worker.end()
    lines = (f"{kind} --number {number}: {line}" for number, line in sorted(bad.items()))
    return Result(len(numbers), tuple(lines))


@dataclass
class Worker:
    """One process that makes tries, one after the other."""

    attempt: Attempt
    kind: str
    seed: int
    folder: Path
    memory: int | None
    number: int = -1
    busy: bool = False
    deadline: float = 0.0
    process: Any = field(init=False)
    connection: "Connection[Any, Any]" = field(init=False)

    def __post_init__(self) -> None:
        self.connection, theirs = FORK.Pipe()
        self.process = FORK.Process(target=self.work, args=(theirs,))
        self.process.start()
        theirs.close()  # so that the end of the process is heard

    def start(self, number: int, seconds: float) -> None:
        """Hand a try to the process."""
        self.number, self.busy, self.deadline = number, True, time.monotonic() + seconds
        with suppress(OSError):  # it has crashed since: its answer will say so
            self.connection.send(number)

    def answer(self, pause: float) -> str | None:
        """What was bad about the try, "" if nothing; None if it is still at work after a pause."""
        if wait([self.connection], pause):
            try:
                return str(self.connection.recv())
            except (EOFError, OSError):
                self.process.join()
                return f"the process ended with status {self.process.exitcode}"
        if time.monotonic() > self.deadline:
            self.end()
            return "it was still at work when its time was over"
        return None

    def end(self) -> None:
        """Kill the process with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def work(self, connection: "Connection[Any, Any]") -> None:
        """Make the tries that are asked for, until there are no more; in the process itself."""
        os.setsid()
        if self.memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self.memory, resource.RLIM_INFINITY))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        while True:
            try:
                number = connection.recv()
            except EOFError:
                return
            connection.send(self.judge(number))

    def judge(self, number: int) -> str:
        """One try in a folder of its own; what was bad about it, in one line, or ""."""
        place = self.folder / f"{self.kind}-{number}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        before = Path.cwd()
        os.chdir(place)
        sys.stdin = io.StringIO("y\n" * 1000)  # says yes to whoever asks
        draw = draw_from(self.kind, self.seed, number)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return complain(lambda: self.attempt(draw, number, place)) or ""
        finally:
            os.chdir(before)
            shutil.rmtree(place, ignore_errors=True)


def complain(check: Callable[[], str | None]) -> str | None:
    """What a check finds bad, or the error that it raises."""
    try:
        return check()
    except (Exception, SystemExit) as error:
        return describe(error)


def describe(error: BaseException) -> str:
    """An error in one line, with the places where it was raised: in attnflow, and below."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/src/attnflow/" in frame.filename]
    shown = (*ours[-1:], *frames[-1:])
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in shown]
    line = frames[-1].line if frames else ""
    message = " ".join(str(error).split())
    return (
        f"{type(error).__name__}: {message[:200]!r} at {', '.join(dict.fromkeys(places))}: {line}"
    )


def refusal(error: af.AttnFlowError) -> str | None:
    """What is bad about an error of attnflow: it must be one line that says something."""
    message = str(error)
    if not message.strip() or len(message.splitlines()) != 1:
        return f"{type(error).__name__} is not one line: {message[:200]!r}"
    return None


def compile_kernels() -> None:
    """Compile what every try would compile otherwise, within its time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        af.flow(af.Attention([[[0.5, 0.5], [0.5, 0.5]]] * 4), layers=range(1, 5))
        af.flow(af.Attention([[[1.0, 0.0], [0.5, 0.5]]] * 4), layers=range(1, 5))
        af.max_flow(af.Attention([[[0.5, 0.5], [0.5, 0.5]]] * 4), source=(4, 0), target=(0, 1))
