"""Prints the results of commands: tables, progress, iterations, memory."""
