"""Exact maximum flow through a layered graph."""
