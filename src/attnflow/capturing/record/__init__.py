"""Attention weights of plain PyTorch modules."""
