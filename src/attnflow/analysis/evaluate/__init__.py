"""Methods judged on examples."""
