"""`attnflow cache`: the models that were converted from GGUF files."""

from typing import Annotated

import typer

from attnflow.core.io.formatting import format_count
from attnflow.models.converted import clear_converted, find_cache, list_converted
from attnflow.show.terminal.tables import say


def cache_command(
    *,
    clear: Annotated[bool, typer.Option("--clear", help="Remove them all.")] = False,
) -> None:
    """List the models that were converted from GGUF files, or remove them.

    Such a file is converted when it is first loaded, so that later loads take seconds. The folder
    is attnflow/gguf in the user's cache, or what the variable ATTNFLOW_CACHE names; if that is
    empty, nothing is kept.
    """
    found = list(list_converted())
    for place, size in found:
        say(f"{place}: {size / 1e6:,.0f} MB")
    if clear and found:
        say(f"removed {format_count(len(found), 'model')}: {clear_converted() / 1e6:,.0f} MB")
    elif not found:
        say(f"no converted models in {find_cache() or 'the cache, which is switched off'}")
