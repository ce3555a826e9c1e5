"""The files that a recording consists of: the runtime writes them, the commands read them."""
