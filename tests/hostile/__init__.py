"""Attacks on every door of attnflow: drawn from a seed, bounded in time, and counted.

`make test-hostile` runs them. One file per kind of attack, each with
`run(numbers, seed, folder) -> Result`. A try follows from its kind, seed and number, and can be
repeated alone: `python -m tests.hostile --only graphs --seed 0 --number 17`.
"""
