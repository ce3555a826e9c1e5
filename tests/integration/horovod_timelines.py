"""Reads which tensors Horovod sent together."""

from __future__ import annotations

import json
import time
from pathlib import Path


def operations_of(timeline: Path) -> list[list[str]]:
    """The tensors of each all-reduce of a timeline, which a thread of rank 0 completes."""
    deadline_s = time.monotonic() + 30
    while not (text := timeline.read_text()).rstrip().endswith("]"):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    operations: list[list[str]] = []
    operation: list[str] = []
    tensors: dict[int, str] = {}
    for event in json.loads(text):
        if event.get("name") == "process_name" and "name" in event["args"]:
            tensors[event["pid"]] = event["args"]["name"]
        elif event.get("ph") == "B" and event.get("name") == "GLOO_ALLREDUCE":
            operation.append(tensors[event["pid"]])
        elif operation and event.get("ph") == "E":
            operations.append(operation)
            operation = []
    return operations
