"""The data-flow graph and its replay: the product's only simulator of time.

`DfgBuilder` (build.py) -> `Dfg` (graph.py) -> `replay` (replay.py, event_loop.py) ->
`Timeline` -> `IterationSummary` (utilisation.py), critical path, Chrome trace.
"""
