"""How much a prediction depends on each token."""
