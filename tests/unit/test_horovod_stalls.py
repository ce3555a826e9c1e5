"""The limit of waits for Horovod's operations. Horovod is not needed."""

from __future__ import annotations

import threading

import pytest

from autotune.errors import LaunchError, SynchronizationError
from autotune.records import Failed, FailureKind
from runtime_rewriter.failures import is_consequence, kind_of_exception, root_cause
from runtime_rewriter.horovod.connection import check_size
from runtime_rewriter.horovod.stalls import StallWatch, set_stall_limit, stall_limit_s

SHUTDOWN, WARNING = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"


def test_a_wait_beyond_the_limit_shuts_horovod_down_and_says_so() -> None:
    down = threading.Event()
    watch = StallWatch(down.set)
    with watch.waiting():
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "horovod-stalls"]
    watch.limit_s = 0.05
    with pytest.raises(ValueError, match="another error"), watch.waiting():
        raise ValueError("another error")
    with watch.unlimited(), watch.waiting():
        assert not down.wait(0.2)
    late = pytest.raises(SynchronizationError, match=r"within 0\.05 s, but one did not")
    with late as stall, watch.waiting():
        assert down.wait(10)
        raise RuntimeError("Horovod has been shut down")
    assert kind_of_exception(stall.value) is FailureKind.HANG


def test_the_limit_is_the_users_or_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (SHUTDOWN, WARNING, "HOROVOD_STALL_CHECK_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    assert stall_limit_s({}) is None
    assert stall_limit_s({SHUTDOWN: "0"}) is None
    assert stall_limit_s({SHUTDOWN: "7", "HOROVOD_STALL_CHECK_DISABLE": "1"}) is None
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    set_stall_limit(60.0)
    assert environment == {SHUTDOWN: "60", WARNING: "30"}
    environment |= {SHUTDOWN: "6"}
    del environment[WARNING]
    set_stall_limit(60.0)
    assert environment == {SHUTDOWN: "6", WARNING: "3"}
    assert stall_limit_s(environment) == 6.0


def test_a_rank_that_only_lost_another_one_is_not_the_cause() -> None:
    lost = Failed(FailureKind.CRASH, "HorovodInternalError: Horovod has been shut down.", 0)
    dead = Failed(FailureKind.CRASH, "rank 1 ended with exit code 7", 1)
    assert is_consequence(lost)
    assert root_cause([lost, dead]) is dead


def test_ranks_that_would_train_alone_are_refused() -> None:
    check_size(2, {"WORLD_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2"})
    check_size(2, {"WORLD_SIZE": "1", "HOROVOD_SIZE": "2"})
    with pytest.raises(LaunchError, match=r"mpirun started 2 ranks .* start the script with horov"):
        check_size(1, {"OMPI_COMM_WORLD_SIZE": "2"})
