"""Results as files, tables and views."""
