"""Traces of other people's jobs, and of ours, as data-flow graphs."""

from autotune.profiling.traces.job import TraceJob, read_job

__all__ = ["TraceJob", "read_job"]
