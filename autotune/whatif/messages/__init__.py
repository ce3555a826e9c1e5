"""The messages of data-parallel training, for what-ifs that send them."""
