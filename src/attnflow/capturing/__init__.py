"""Model and input in, what its layers mixed out."""
