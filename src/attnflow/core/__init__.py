"""Arrays in, token attention out: checks, graphs, methods, results and their files. No torch."""
