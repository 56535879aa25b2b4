"""`Model`, `load`, inputs, and the model that ships with attnflow."""
