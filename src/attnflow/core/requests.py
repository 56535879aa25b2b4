"""shim"""

from attnflow.core.methods import (
    MOSTLY,
    NORMALIZATIONS,
    are_even,
    names as name_positions,
    warn_if_even,
)  # noqa
