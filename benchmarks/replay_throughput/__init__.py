"""How fast is the replay? `python -m benchmarks.replay_throughput`"""
