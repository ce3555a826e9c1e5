"""The HTML pages: one of a job, one of a replayed iteration."""
