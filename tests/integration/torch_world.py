"""Starts real processes over gloo, or over NCCL on one GPU, with a timeout for everything."""

from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing
import multiprocessing.context
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from autotune.jobs.campaign.one_gpu import own_host_environment

INIT_TIMEOUT = timedelta(seconds=60)
BACKEND, _, DEVICE = os.environ.get("AUTOTUNE_TEST_WORLD", "gloo:cpu").partition(":")
"""`AUTOTUNE_TEST_WORLD=nccl:cuda pytest tests/integration` tests the torch runtime on a GPU."""


def run_world(
    check: Callable[..., Any],
    size: int,
    *arguments: Any,
    timeout_s: float = 240.0,
    backend: str = BACKEND,
    device: str = DEVICE,
    process: Callable[..., BaseProcess] | None = None,
) -> list[Any]:
    """Run `check(rank, *arguments)` in `size` processes with a process group; results by rank.

    A rank that raises fails the test with its traceback. One that exits silently returns None.
    `process`: builds the processes; by default they are forked from `fork_server`.
    `device`: the default device of tensors. On `cuda` all ranks share one GPU. On `cuda:0` the
    process group is also bound to it, and splits its communicators.
    """
    context = fork_server()
    # Here and not in rank 0, which may be done while another rank still asks for the last address
    # of a process group.
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=INIT_TIMEOUT
    )
    where = (store.port, backend, device)
    pipes = [context.Pipe(duplex=False) for _ in range(size)]
    shares = [(pipes[rank][1], check, rank, size, where, arguments) for rank in range(size)]
    build = process or context.Process
    processes = [build(target=_rank_main, args=share, daemon=True) for share in shares]
    for started in processes:
        started.start()
    for _, sending in pipes:
        sending.close()
    deadline = time.monotonic() + timeout_s
    results = [_receive(receiving, deadline) for receiving, _ in pipes]
    for started in processes:
        started.join(timeout=max(0.1, min(10.0, deadline - time.monotonic())))
        if started.is_alive():
            started.kill()
            started.join()
    errors = [f"rank {r}:\n{value}" for r, (kind, value) in enumerate(results) if kind == "error"]
    assert not errors, "\n".join(errors)
    return [value for _, value in results]


def on_ranks(*sizes: int, each: Iterable[Any] = ()) -> Callable[..., Callable[[], None]]:
    """Run `test(rank)`, or `test(rank, case)` for `each` case, in a world of each of these sizes.

    All cases run in the same processes, since these start slowly; a failure names its case.
    """

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        cases: list[tuple[Any, ...]] = [(case,) for case in each] or [()]

        @functools.wraps(test)
        def started() -> None:
            names = (test.__module__, test.__name__)
            for size in sizes:
                run_world(_test_on_rank, size, *names, timeout_s=max(240.0, 90.0 * len(cases)))

        started.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
        started.cases = cases  # type: ignore[attr-defined]
        return started

    return decorate


def _test_on_rank(rank: int, module: str, name: str) -> None:
    started = getattr(import_module(module), name)
    for case in started.cases:
        try:
            started.__wrapped__(rank, *case)
        except BaseException as error:
            error.add_note(f"in the case {case}")
            raise
        gc.collect()  # until then threads of gloo's closed process groups wake up every 10 ms


def set_host(rank: int, layout: tuple[int, ...]) -> int:
    """Set a launcher's variables for hosts of `layout` ranks; return the rank on its host."""
    for size in layout:
        if rank < size:
            os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
            return rank
        rank -= size
    raise ValueError(f"{layout} has no rank {rank}")


IMPORTED = (
    "fork_server_setup",
    "torch",
    "torch._dynamo.utils",
    "pytest",
    *(
        f"runtime_rewriter.{name}"
        for name in (
            "horovod.tensorflow_scripts",
            "horovod.torch_scripts",
            "mirrored.scripts",
            "rank.activities",
            "rank.apply",
            "rank.keras_scripts",
            "rank.launch",
            "rank.own_ranks",
            "rank.session",
            "recording.api",
        )
    ),
    "local_world",
    "torch_scripts",
    "torch_plans",
    "ddp_pair",
    "emulated_models",
)
"""Modules that most ranks import. None of them imports Horovod, TensorFlow or numba."""
TESTS = Path(__file__).parents[1]
_STARTING = Lock()


def fork_server() -> multiprocessing.context.ForkServerContext:
    """A server that has imported torch: a process costs a fork instead of seconds of imports."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    ensure_running(forkserver.ensure_running)
    return context


def ensure_running(start: Callable[[], None]) -> None:
    """Call `start`, which starts a fork server unless it runs, with the server's environment.

    The server finds our helpers by PYTHONPATH alone: Python 3.11 gives it no `sys.path`, and it
    ignores modules that it does not find. `fork_server_setup` expects these two folders.

    Each thread of its processes computes on itself alone. OpenMP reads that when it is loaded;
    `torch.set_num_threads` sets it for one thread, and those of the others spin while they wait.
    """
    with _STARTING:
        inherited = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "PYTHONPATH")}
        folders = (str(TESTS / "integration"), str(TESTS), inherited["PYTHONPATH"] or "")
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)}
        try:
            start()
        finally:
            for name, value in inherited.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def exempt_imports() -> None:
    """Let collections of this forked process visit none of the server's objects.

    They would take 0.1 to 0.3 s each, and every visited object's memory would be copied.
    """
    gc.freeze()
    gc.enable()


def _receive(receiving: Connection, deadline: float) -> tuple[str, Any]:
    try:
        if receiving.poll(max(0.0, deadline - time.monotonic())):
            kind, value = receiving.recv()
            return kind, value
    except EOFError:
        return "gone", None
    return "error", "no answer in time"


def _rank_main(
    sending: Connection,
    check: Callable[..., Any],
    rank: int,
    size: int,
    where: tuple[int, str, str],
    arguments: tuple[Any, ...],
) -> None:
    # Collections visit none of the server's objects, and run between cases only: otherwise every
    # plan that crosses the step would be loaded with one.
    gc.freeze()
    port, backend, device = where
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"barrier\(\): using the device under current context")
    torch.set_num_threads(1)
    bound = None
    if device.startswith("cuda"):
        _on_one_gpu(rank)
        bound = torch.device(device) if ":" in device else None
    torch.manual_seed(0)
    try:
        store = dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=INIT_TIMEOUT)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=INIT_TIMEOUT, device_id=bound
        )
        # A rank that is done at once would close connections that another one still makes.
        store.set(f"connected {rank}", "")
        store.wait([f"connected {other}" for other in range(size)])
        sending.send(("ok", check(rank, *arguments)))
    except BaseException:  # noqa: BLE001 - the parent reports it
        sending.send(("error", traceback.format_exc()))
    finally:
        sending.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _on_one_gpu(rank: int) -> None:
    """Use deterministic kernels, and the GPU as the default device."""
    os.environ |= own_host_environment(rank) | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    torch.use_deterministic_algorithms(True)
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")


def default_store() -> dist.Store:
    """The store of this world, which the test's process keeps."""
    return dist.distributed_c10d._get_default_store()


def seeded(seed: int) -> torch.Generator:
    """A generator on the default device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
