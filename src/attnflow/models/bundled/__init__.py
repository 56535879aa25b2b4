"""The model that ships with attnflow."""
