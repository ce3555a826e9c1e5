"""Rewrites a single-device TensorFlow training graph into the distributed graph of a plan.

`capture` turns a program into a `TrainingGraph`; `workload` describes it for planning; `distribute`
returns the `DistributedGraph` of a plan. Only this package imports TensorFlow.
"""
