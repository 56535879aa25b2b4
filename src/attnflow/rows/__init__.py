"""Inputs of any length: rows and segments, without a matrix."""
