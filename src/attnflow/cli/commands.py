"""The command line: its commands, and how an error of the user's becomes one line."""

import os
import sys
import warnings
from contextlib import suppress
from typing import Annotated, Any

import typer

from attnflow import __version__
from attnflow.cli import arrays, comparing, corpora, evaluating, explaining, lab, sharing
from attnflow.cli.wording import speak_options
from attnflow.errors import AttnFlowError
from attnflow.show.terminal import print_note, say

# what typer raises of a command line that it cannot read; newer versions bring a click of their own
USAGE_ERROR: Any = next(
    parent for parent in typer.BadParameter.__mro__ if parent.__name__ == "ClickException"
)

app = typer.Typer(
    help="Which input tokens does a Transformer look at?"
    " Raw attention, attention rollout and attention flow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(asked: bool) -> None:
    """Print the version, if it was asked for."""
    if asked:
        say(f"attnflow {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command("raw")(arrays.raw_command)
app.command("rollout")(arrays.rollout_command)
app.command("flow")(arrays.flow_command)
app.command("capture")(explaining.capture_command)
app.command("generate")(explaining.generate_command)
app.command("explain")(explaining.explain_command)
app.command("compare")(comparing.compare_command)
app.command("demo")(explaining.demo_command)
app.command("segments")(sharing.segments_command)
app.command("evaluate")(evaluating.evaluate_command)
app.add_typer(corpora.app, name="corpus")
app.add_typer(lab.train, name="train")
app.add_typer(lab.reproduce, name="reproduce")


def main() -> None:
    """Run the command line; an error of the user's input is one line and exit status 2."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            # a token that the terminal cannot show is no reason to stop
            stream.reconfigure(errors="replace")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars, too, stay out of pipes
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: print_note(message)
            status = app(standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, as head has
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
    """What happened, for a user who did not write the code; empty if the help was shown instead."""
    if isinstance(error, AttnFlowError):
        return speak_options(str(error), list_options(), " ".join(sys.argv[1:]))
    if isinstance(error, USAGE_ERROR):
        if type(error).__name__ == "NoArgsIsHelpError":
            return ""
        context = getattr(error, "ctx", None)
        way_out = "" if context is None else f"; see {context.command_path} --help"
        return f"{error.format_message().rstrip('.')}{way_out}"
    if isinstance(error, OSError):
        place = "cannot write the output" if error.filename is None else error.filename
        return f"{place}: {error.strerror or error}"
    if isinstance(error, MemoryError):
        return (
            "there is not enough memory for this; give a shorter text, or ask for fewer layers"
            " (attnflow segments takes texts of any length)"
        )
    if isinstance(error, RecursionError):
        return "the input is nested too deeply to be read"
    return f"a text cannot be read or written: {error}"


def list_options() -> dict[str, str]:
    """The options of the command that was called, as `speak_options` takes them."""
    command: Any = typer.main.get_command(app)
    for word in sys.argv[1:]:
        command = getattr(command, "commands", {}).get(word, command)
    flags = [each for each in command.params if each.opts[0].startswith("--")]
    return {each.name: each.opts[0] + "=" * (not each.is_flag) for each in flags}


def drop_output() -> None:
    """Let go what standard output does not take, or Python tries again, and complains, at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
