"""Messages of the library in the words of the command line: its options instead of arguments."""

import re
from collections.abc import Mapping

from attnflow.cli.options import OWN

# what Python code would give, and what a command line does
PHRASES = {
    "a function: {name: function}": f"a function as {OWN}",
    "a function of the curve: {name: function}": f"a function of the curve as {OWN}",
    "what af.edge_weight makes": f"what af.edge_weight makes, as {OWN}",
    "rollout_rows and rollout_segments build": "attnflow segments builds",
}
CALL = r"\w+\([^()]*\)"  # flow(graph, groups='words'): what to write in Python stays Python
ARGUMENT = r"(?<![\w'\"/.-])(?P<name>[a-z_]+)=(?P<value>'[^']*'|\[[^]]*\]|[\w.+-]+)"
NAME = r"(?<![\w'\"/.-])(?P<bare>[a-z]+(?:_[a-z]+)+)(?![\w'\"/=.(-])"


def speak_options(message: str, options: Mapping[str, str], typed: str = "") -> str:
    """A message with the options of a command where it has arguments of Python.

    options: by the argument's name, the option, and "=" after it if it takes a value.
    typed: the command line; what stands there is the user's, and stays as it is.

    >>> known = {"edges": "--edges=", "text_column": "--text-column=", "truncation": "--truncation"}
    >>> speak_options("use edges='attention', or pass truncation=True", known)
    'use --edges attention, or pass --truncation'
    >>> speak_options("name it by text_column", known)
    'name it by --text-column'
    """

    def translate(found: re.Match[str]) -> str:
        option = options.get(found["name"] or found["bare"] or "")
        if option is None or found[0] in typed:
            return found[0]
        flag, takes_value, _ = option.partition("=")
        if found["bare"]:
            return flag
        value = found["value"].strip("'[]").replace("None", "none")
        if takes_value:
            return f"{flag} {value}"
        return flag if value == "True" else found[0]

    for python, spoken in PHRASES.items():
        message = message.replace(python, spoken)
    return re.sub(f"{CALL}|{ARGUMENT}|{NAME}", translate, message)
