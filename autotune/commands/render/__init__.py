"""What the commands print: tables, progress, iterations, memory."""
