"""The what-ifs that come with autotune, one module per topic."""
