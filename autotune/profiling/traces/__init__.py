"""All traces of a training job, matched across ranks."""

from autotune.profiling.traces.job import TraceJob, read_job

__all__ = ["TraceJob", "read_job"]
