"""Figures, in matplotlib."""
