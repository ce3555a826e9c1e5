"""Changes of one strategy: the edits that the search and the sampler share."""
