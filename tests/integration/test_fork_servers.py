"""Ranks are forked from servers that have imported what they need, with this environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from torch_world import IMPORTED, fork_server


def assert_prepared(process: Callable[..., BaseProcess], *modules: str) -> None:
    """Check a process of the server before it unpickles a function of ours."""
    receiving, sending = fork_server().Pipe(duplex=False)
    code = "import os, sys; sending.send(([*sys.modules], os.environ.get('PYTHONPATH')))"
    started = process(target=exec, args=(code, {"sending": sending}), daemon=True)
    started.start()
    sending.close()
    assert receiving.poll(240.0)
    imported, path = receiving.recv()
    started.join()
    assert not {*IMPORTED, *modules} - {*imported}
    assert path == os.environ.get("PYTHONPATH")


def test_a_forked_process_has_imported_helpers_and_has_our_path() -> None:
    assert_prepared(fork_server().Process)
