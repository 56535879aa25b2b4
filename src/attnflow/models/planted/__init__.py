"""Models whose answers are known by construction."""
