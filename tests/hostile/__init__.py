"""Attacks on every door of attnflow, drawn from a seed, run within a time, and counted: what `make test-hostile` runs.

One file per kind of attack, each with `run(numbers, seed, folder) -> Result`. A try is named by its kind, seed and number alone, and can be
repeated alone: `python -m tests.hostile --only graphs --seed 0 --number 17`.
"""
