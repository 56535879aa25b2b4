"""Prompts whose true token is known, and methods judged by where they rank it."""
