"""Errors and warnings. Every error that an input can cause is an `AttnFlowError` of one line."""

from collections.abc import Iterable

MAX_MESSAGE = 600  # characters; the value in a message may be a whole book


def printable(text: object, keep: str = "") -> str:
    r"""Escape every character of a text that is not printable.

    Control characters in a token, a label or a file name would move the cursor, rename the window
    or reverse the line; lone surrogates cannot be written at all.
    keep: characters that are not escaped, for instance line breaks.

    >>> printable("\x1b[31mred")
    '\\x1b[31mred'
    """
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode()
        for character in str(text)
    )


class AttnFlowError(Exception):
    """The parent of all errors: the rule, the value that broke it, and the remedy, in one line.

    options: the arguments that the message is about, by their names or as the message spells them,
    "text_column" or "truncation=True", for callers that spell them otherwise, as the command line
    does.
    """

    def __init__(self, message: object = "", *, options: Iterable[str] = ()) -> None:
        line = printable(" ".join(str(message).split()))
        super().__init__(line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]} ...")
        self.options = tuple(options)


class WeightsError(AttnFlowError, ValueError):
    """An array that does not hold attention weights."""


class OptionError(AttnFlowError, ValueError):
    """An option out of its range, or a name that does not exist."""


class TooLongError(OptionError):
    """An input with more tokens than the model takes."""


class FileError(AttnFlowError, ValueError):
    """A file that cannot be read or written."""


class CaptureError(AttnFlowError, ValueError):
    """A model whose attention cannot be captured, or is not attention."""


class MissingExtraError(AttnFlowError, ImportError):
    """A required library that is not installed."""


class RoundingWarning(UserWarning):
    """Digits were lost: a score that is zero by construction, or edges of very different sizes."""


class CorpusWarning(UserWarning):
    """A problem with the input or the folder of a corpus."""


class ShareWarning(UserWarning):
    """A row of which too little was kept to be meaningful."""


class TargetWarning(UserWarning):
    """A target or foil that is probably not the token that was meant."""


class SaturationWarning(UserWarning):
    """Attention flow that equals a bound, or is even, and so hardly tells tokens apart."""
