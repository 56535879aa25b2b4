"""The experiments of the paper: data, training, and one file per table or figure."""
