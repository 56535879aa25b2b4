"""Wiring patterns: how a block adds its branches to the residual stream."""
