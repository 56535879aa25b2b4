"""Edge weights of the attention graph, one file each."""
