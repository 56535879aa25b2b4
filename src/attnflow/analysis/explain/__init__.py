"""One input explained, and two explanations compared."""
