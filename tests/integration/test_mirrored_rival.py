"""Workers of TensorFlow's MultiWorkerMirroredStrategy in a testbed, as a rival starts them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from testbed_traffic import cluster

from autotune.testbed.capabilities import capabilities
from autotune.workload import Variable, Workload
from benchmarks.mirrored_ranks.start import Case, run_cases

ABLE = capabilities()
pytestmark = [
    pytest.mark.skipif(not ABLE.possible, reason=ABLE.message),
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="needs the extra tensorflow"),
    pytest.mark.slow,
]


def test_a_worker_on_a_slow_link_gets_the_last_sums_of_those_that_are_done(tmp_path: Path) -> None:
    """The second worker has all its sums 0.4 s before the third one has received them from it."""
    shape = (256, 1024)
    variables = (Variable(f"v{number}", shape, ready_s=0.0, needed_s=0.0) for number in range(3))
    workload = Workload("made", tuple(variables), forward_s=1e-3, backward_s=1e-3, update_s=0.0)
    case = Case(bytes_per_pack=0, steps=1, warmup=0)
    (steps_s,) = run_cases(cluster(1000, 1000, 20), workload, [case], tmp_path)
    assert len(steps_s) == case.steps
