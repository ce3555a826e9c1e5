"""Every acknowledged event is on disk, whenever the writer is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from synthetic_job import SyntheticWorld, drive, job_spec

from autotune.rng import generator
from autotune.storage.store import Store
from autotune.tuning.history import History

KILLS = 20


def test_no_acknowledged_event_is_lost_or_doubled_over_twenty_kills(tmp_path):
    path = tmp_path / "autotune.db"
    spec = job_spec(max_trials=32)
    expected, _ = drive(spec, SyntheticWorld({5: 0.06}, noise=0.05))
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
    """Run a child that appends the missing events, a byte each; kill it after `delay_s`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _append_all(path, expected, writing)
        finally:
            os._exit(0)
    os.close(writing)
    acknowledged = sum(len(os.read(reading, 1)) for _ in range(after_bytes))
    time.sleep(delay_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while data := os.read(reading, 4096):
        acknowledged += len(data)
    os.close(reading)
    return acknowledged


def _append_all(path: Path, expected: History, acknowledgements: int) -> None:
    with Store.open(path) as store, store.lock("job"):
        first = len(store.history("job").events)
        for seq, event in enumerate(expected.events[first:], start=first):
            store.append("job", seq, event)
            os.write(acknowledgements, b".")
