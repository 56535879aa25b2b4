"""What an edge of the attention graph can weigh: one file for each weight."""
