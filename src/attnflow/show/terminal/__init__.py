"""Explanations on a terminal."""
