"""Whether predictions change as scores say."""
