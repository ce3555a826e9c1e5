"""What two real ranks of Horovod record: calls on every rank, and rank 0's timeline."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch_scripts import run_forked

from autotune.profiling.formats.horovod import HorovodTimeline, read_horovod
from autotune.profiling.graph.horovod_steps import horovod_steps
from autotune.recordings.horovod_calls import HorovodCall
from runtime_rewriter.horovod.rendezvous import rendezvous_server

pytestmark = pytest.mark.skipif(find_spec("horovod") is None, reason="`make horovod` builds it")
SCRIPT = Path(__file__).with_name("horovod_script.py")
RANKS = 2
TIMEOUT_S = 120.0
GRADIENTS = {"1.bias": 40, "1.weight": 2560, "0.bias": 256, "0.weight": 16384}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("horovod")
    with rendezvous_server("127.0.0.1") as port:
        shared = {
            "HOROVOD_SIZE": str(RANKS),
            "HOROVOD_LOCAL_SIZE": str(RANKS),
            "HOROVOD_CROSS_RANK": "0",
            "HOROVOD_CROSS_SIZE": "1",
            "HOROVOD_HOSTNAME": "localhost",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": "240",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "HOROVOD_TIMELINE": str(folder / "timeline.json"),
            "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        }
        of_ranks = [
            {**shared, "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)}
            for rank in range(RANKS)
        ]
        done = run_forked([str(SCRIPT), str(folder)], of_ranks, TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    results = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return folder, results


def calls_of(result: dict[str, Any]) -> list[HorovodCall]:
    return [HorovodCall(**call) for call in result["calls"]]


def timeline_in(folder: Path) -> HorovodTimeline:
    with (folder / "timeline.json").open("rb") as file:
        return read_horovod(file.read, "timeline.json")


def test_every_rank_logs_the_calls_of_its_optimizer_and_of_the_script(recorded) -> None:
    for result in recorded[1]:
        calls = calls_of(result)
        assert result["restored"]
        assert result["sum"] == [8.0, 4.0]  # averages of ones
        for step in range(3):
            of_step = {call.name: call.size_bytes for call in calls if call.step == step}
            assert {name.rpartition("allreduce.")[2]: size for name, size in of_step.items()} == (
                GRADIENTS
            )
        others = [(call.name, call.op, call.tensors, call.size_bytes, call.dtype) for call in calls]
        assert others[-2:] == [
            ("group", "all_reduce", 2, 48, "float32"),
            ("two", "broadcast", 1, 16, "float64"),
        ]


def test_a_completion_lies_between_the_last_look_without_and_the_first_look_with_it(
    recorded,
) -> None:
    for result in recorded[1]:
        for call in calls_of(result):
            assert call.complete_s is not None
            assert call.awaited_s is not None
            assert call.called_s <= call.returned_s <= call.incomplete_s <= call.complete_s


def test_the_timeline_of_rank_0_shows_the_same_steps(recorded) -> None:
    folder, results = recorded
    timeline = timeline_in(folder)
    assert timeline.ranks == RANKS
    assert len(timeline.cycles_s) > 3
    steps = horovod_steps(timeline)
    assert len(steps) == 3
    calls = [call for result in results for call in calls_of(result)]
    for step in steps:
        batches = [timeline.batches[number] for number in step.batches]
        assert sum(batch.size_bytes for batch in batches) == sum(GRADIENTS.values())
        first_s = min(call.called_s for call in calls if call.step == step.number)
        last_s = max(call.complete_s or 0.0 for call in calls if call.step == step.number)
        transfers_s = [end_s - start_s for start_s, end_s in (one.transfer_s for one in batches)]
        assert 0 < sum(transfers_s) < last_s - first_s
