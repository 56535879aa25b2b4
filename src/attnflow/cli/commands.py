"""The command line: its commands, and errors as one line."""

import os
import re
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer

from attnflow import __version__
from attnflow.cli import arrays, lab
from attnflow.cli import cache as caching
from attnflow.cli import compare as comparing
from attnflow.cli import corpus as corpora
from attnflow.cli import evaluate as evaluating
from attnflow.cli import explain as explaining
from attnflow.cli import generate as generating
from attnflow.cli import intervene as intervening
from attnflow.cli import segments as sharing
from attnflow.errors import AttnFlowError
from attnflow.show.terminal.tables import print_note, say

# what typer raises for a command line that it cannot read; newer versions vendor click
USAGE_ERROR: Any = next(
    parent for parent in typer.BadParameter.__mro__ if parent.__name__ == "ClickException"
)

main_app = typer.Typer(
    help="Which input tokens does a Transformer look at?"
    " Raw attention, attention rollout and attention flow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    """Print the version for --version."""
    if asked:
        say(f"attnflow {__version__}")
        raise typer.Exit


@main_app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


main_app.command("raw")(arrays.raw_command)
main_app.command("rollout")(arrays.rollout_command)
main_app.command("flow")(arrays.flow_command)
main_app.command("capture")(explaining.capture_command)
main_app.command("generate")(generating.generate_command)
main_app.command("explain")(explaining.explain_command)
main_app.command("compare")(comparing.compare_command)
main_app.command("intervene")(intervening.intervene_command)
main_app.command("demo")(explaining.demo_command)
main_app.command("segments")(sharing.segments_command)
main_app.command("evaluate")(evaluating.evaluate_command)
main_app.command("cache")(caching.cache_command)
main_app.add_typer(corpora.corpus_app, name="corpus")
main_app.add_typer(lab.train_app, name="train")
main_app.add_typer(lab.reproduce, name="reproduce")


def main() -> None:
    """Run the command line; an error that input can cause is one line and exit status 2."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the parent process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            # a token that the terminal cannot show is replaced
            stream.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars, too, stay out of pipes
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print_note(message)
            status = main_app(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe, such as head, is done
        status = 1
        drop_output()
    except typer.Abort:
        status = 130
    except (
        AttnFlowError,
        USAGE_ERROR,
        OSError,
        UnicodeError,
        MemoryError,
        RecursionError,
    ) as error:
        status = 2
        line = AttnFlowError(describe(error))
        if isinstance(error, OSError):
            drop_output()
        with suppress(OSError):
            if str(line):
                print(f"attnflow: {line}", file=sys.stderr, flush=True)
    sys.exit(status)


def describe(error: BaseException) -> str:
    """An error as one line for users; empty if the help was shown instead."""
    if isinstance(error, AttnFlowError):
        return spell_options(error, list_flags())
    if isinstance(error, USAGE_ERROR):
        if type(error).__name__ == "NoArgsIsHelpError":
            return ""
        context = getattr(error, "ctx", None)
        remedy = "" if context is None else f"; see {context.command_path} --help"
        return f"{error.format_message().rstrip('.')}{remedy}"
    if isinstance(error, OSError):
        place = "cannot write the output" if error.filename is None else error.filename
        return f"{place}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        known = f": {error}" if str(error) else ""
        return (
            f"there is not enough memory for this{known}; give a shorter text, or ask for fewer"
            " layers (attnflow segments takes texts of any length)"
        )
    if isinstance(error, RecursionError):
        return "the input is nested too deeply to be read"
    return f"a text cannot be read or written: {error}"


def spell_options(error: AttnFlowError, flags: Mapping[str, str]) -> str:
    """The message of an error, with the options that it names as the command line spells them.

    flags: the options of the command, by the names of the arguments.

    >>> error = AttnFlowError("pass truncation=True to cut it", options=["truncation=True"])
    >>> spell_options(error, {"truncation": "--truncation"})
    'pass --truncation to cut it'
    """
    message = str(error)
    for option in error.options:
        name, _, value = option.partition("=")
        flag = flags.get(name) or flags.get(name.removesuffix("s"))  # one layer, for layers
        if flag is not None:
            given = {"True": "", "None": "none"}.get(value, value.strip("'"))
            spelled = f"{flag} {given}".rstrip()
            spelled = spelled.replace("\\", r"\\")
            message = re.sub(rf"(?<![\w-]){re.escape(option)}(?!\w)", spelled, message)
    return message


def list_flags() -> dict[str, str]:
    """The options of the command that was called, by the names of its arguments."""
    command: Any = typer.main.get_command(main_app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    return {each.name: each.opts[0] for each in command.params if each.opts[0].startswith("--")}


def drop_output() -> None:
    """Discard what standard output does not take: at exit, Python would fail to write it again."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
