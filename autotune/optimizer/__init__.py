"""Search the synchronization, and with an op graph the op fusion, with the shortest replayed step.

`optimize` (optimize.py) or `suggestions` (suggest.py) pass `State`s from starts.py to `Search`
(search.py). The `Pass`es (passes/, registry.py) propose states from the `CriticalPath` that
`Replays` (replays.py) finds with `autotune.lowering`.
"""
