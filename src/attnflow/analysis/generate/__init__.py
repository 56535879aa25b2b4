"""Generated tokens and what they read."""
