"""The built-in passes of the optimizer; plugins add others (`registry.PASSES`)."""
