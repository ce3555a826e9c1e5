"""Enacts plans in Horovod scripts, through Horovod's public API."""
