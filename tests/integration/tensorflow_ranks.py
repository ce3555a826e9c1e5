"""Ranks that are forked with TensorFlow imported: its import takes 7 s, and a fork milliseconds.

Python keeps one fork server per process. This one is another, since ranks of PyTorch should not
have TensorFlow among their modules.
"""

from __future__ import annotations

import multiprocessing.context
from multiprocessing import forkserver, popen_forkserver
from threading import Lock
from typing import Any
from unittest import mock

from local_world import ForkedRank
from torch_world import IMPORTED, ensure_running

from runtime_rewriter.world.worker import ProcessSupervisor

_SERVER = forkserver.ForkServer()
_SERVER.set_forkserver_preload([*IMPORTED, "tensorflow", "keras"])
_CONNECT, _CONNECTING = "connect_to_new_process", Lock()


class TensorflowProcess(multiprocessing.context.ForkServerProcess):
    """A process forked from the server with TensorFlow."""

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - the name is that of multiprocessing
        ensure_running(_SERVER.ensure_running)
        ours = mock.patch.object(forkserver, _CONNECT, _SERVER.connect_to_new_process)
        with _CONNECTING, ours:
            return popen_forkserver.Popen(process)


class TensorflowRank(ForkedRank):
    """Implements `Process`; the class itself is a `Spawn`."""

    kind = TensorflowProcess


def with_tensorflow() -> ProcessSupervisor:
    return ProcessSupervisor(TensorflowRank)
