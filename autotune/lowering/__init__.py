"""Lower a plan to the data-flow graph that the runtime would execute, and predict its step time.

The flow, with the type that each file passes on:

- `messages.py`: `Plan` -> `list[Batch]`, the messages of each kind with their `TimedStep`s. Its
  helpers: `steps.py` lists the `Step`s of a message; `step_times.py` gives a `Step` its `StepTimes`
  from the cluster's fits (`fitted_costs.py`), the rates between peers (`peer_costs.py`) and the
  `Traffic` of its collective (`traffic.py`, `tree.py`).
- `compute.py`: `HostCosts` (`host_costs.py`) -> a worker's ops in the `DfgBuilder`.
- `network.py`: `list[Batch]` -> the messages' ops in the `DfgBuilder`, as `MessageOps`. The ops of
  a message without its times are a `Shape` (`shapes.py`, built from `template.py`). `joined.py`
  keeps the shapes between plans and joins those of a plan; `durations.py` has the times.
- `lower.py`: `Lowering`, `Plan` -> `Dfg`, from the two above.
- `replayed.py`: `LoweredSteps`, `Plan` -> `Dfg` -> `Timeline` (`autotune.dfg`) -> seconds per step.
- `costs.py`: `RuntimeCosts`, the constants of the runtime that all of them use.
"""
