"""Importing this module registers all what-ifs."""
