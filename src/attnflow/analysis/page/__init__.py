"""The data of the interactive pages, computed before they are drawn."""
