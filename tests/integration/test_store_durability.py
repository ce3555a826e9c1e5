"""Every acknowledged event is on disk, whenever the writer is killed."""

from __future__ import annotations

import contextlib
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

from synthetic_job import SyntheticWorld, drive, job_spec
from torch_world import fork_server

from autotune.rng import generator
from autotune.storage.store import Store
from autotune.tuning.history import History

KILLS = 20
MOST_EVENTS = 3
"""Events that one writer appends; then it waits for its end."""
WAIT_S = 60.0


def test_no_acknowledged_event_is_lost_or_doubled_over_twenty_kills(tmp_path):
    path = tmp_path / "autotune.db"
    spec = job_spec(max_trials=96)
    expected, _ = drive(spec, SyntheticWorld({5: 0.06}, noise=0.05))
    assert len(expected.events) > KILLS * MOST_EVENTS, "otherwise the last writers find none"
    rng = generator(0, "kills")
    with Store.open(path) as store:
        store.create_job("job", spec)
    stored = 0
    for _ in range(KILLS):
        acknowledged = _write_until_killed(
            path, expected, after_bytes=int(rng.integers(0, 3)), delay_s=float(rng.uniform(0, 0.01))
        )
        with Store.open(path) as store:
            events = store.history("job").events
        # The event in progress at the signal may be stored or not; no later one can be.
        assert stored + acknowledged <= len(events) <= stored + acknowledged + 1
        assert events == expected.events[: len(events)]
        stored = len(events)
    assert stored > KILLS
    with Store.open(path) as store:
        assert len([item for item in store.outbox.waiting("job") if item.kind == "event"]) == stored


def _write_until_killed(path: Path, expected: History, after_bytes: int, delay_s: float) -> int:
    """Run a child that appends missing events, with a byte for each; kill it after `delay_s`."""
    # A plain fork would copy the locks that the test runner's own threads hold at that moment, and
    # a server of our own would be that of all later tests of this process.
    context = fork_server()
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=_append, args=(path, expected, writing))
    child.start()
    writing.close()
    acknowledged = 0
    while acknowledged < after_bytes:
        assert reading.poll(WAIT_S), f"the child acknowledged no event within {WAIT_S} s"
        acknowledged += len(reading.recv_bytes())
    time.sleep(delay_s)
    child.kill()
    child.join(WAIT_S)
    assert child.exitcode == -signal.SIGKILL
    acknowledged += _received(reading)
    reading.close()
    return acknowledged


def _received(reading: Connection) -> int:
    """Count the acknowledgements that a dead child left in the pipe."""
    count = 0
    with contextlib.suppress(EOFError):
        while True:
            count += len(reading.recv_bytes())
    return count


def _append(path: Path, expected: History, acknowledgements: Connection) -> None:
    with Store.open(path) as store, store.lock("job"):
        first = len(store.history("job").events)
        for seq in range(first, first + MOST_EVENTS):
            store.append("job", seq, expected.events[seq])
            acknowledgements.send_bytes(b".")
    time.sleep(WAIT_S)
