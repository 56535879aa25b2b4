"""Figures, the page and the terminal: they take results and compute nothing."""
