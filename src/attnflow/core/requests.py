"""shim"""
from attnflow.core import methods

MOSTLY, NORMALIZATIONS, are_even = methods.MOSTLY, methods.NORMALIZATIONS, methods.are_even
name_positions, warn_if_even = methods.names, methods.warn_if_even
