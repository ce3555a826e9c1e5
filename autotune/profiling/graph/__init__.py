"""The steps of a traced job as data-flow graphs."""
