"""The figures, under the name by which users import them: `from attnflow import figures`."""

from attnflow.show.figures import *  # noqa: F403
from attnflow.show.figures import __all__ as __all__
