"""A data set into Parquet shards, resumable, in processes or on Ray."""
