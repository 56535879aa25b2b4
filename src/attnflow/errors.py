"""What attnflow raises: an error that a user's input can cause is an `AttnFlowError`, one line."""

LONGEST = 600  # characters of a message; a value that breaks a rule may be a whole book


def printable(text: object, keep: str = "") -> str:
    r"""A text as a terminal may show it: every character that cannot be seen is escaped.

    Control characters in a token, a label or the name of a file would move the cursor, rename the
    window or reverse the line, and a lone surrogate cannot be written at all.
    keep: characters that stay as they are, for instance line breaks.

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
    """The parent of all errors: the rule, the value that broke it, and the way out, in one line."""

    def __init__(self, message: object = "") -> None:
        line = printable(" ".join(str(message).split()))
        super().__init__(line if len(line) <= LONGEST else f"{line[:LONGEST]} ...")


class WeightsError(AttnFlowError, ValueError):
    """An array that is not attention weights."""


class OptionError(AttnFlowError, ValueError):
    """An option out of its range, or a name that does not exist."""


class FileError(AttnFlowError, ValueError):
    """A file that cannot be read as what it should be, or cannot be written."""


class CaptureError(AttnFlowError, ValueError):
    """A model whose attention cannot be captured, or did not come out as attention."""


class MissingExtraError(AttnFlowError, ImportError):
    """A library that this function needs and that is not installed."""


class RoundingWarning(UserWarning):
    """A score that is zero by the model's construction, so that what is left is rounding error."""


class CorpusWarning(UserWarning):
    """Something about the input or the folder of a corpus that its user should know."""


class ShareWarning(UserWarning):
    """So little of a row was kept that what is left of it says little."""


class SaturationWarning(UserWarning):
    """Attention flow has reached a bound that no source changes, so it says nothing about it."""
