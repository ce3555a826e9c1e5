"""Closed forms: the time of a message, what its rows move, and the order in which messages are issued."""
