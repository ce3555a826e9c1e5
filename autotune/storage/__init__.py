"""The trial store: events and trials of all jobs in one SQLite database."""
