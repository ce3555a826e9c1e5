"""From a recorded step to its base: ops with their operators, gradients, the profiler's cost."""
