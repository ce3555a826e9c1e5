"""Lets code run as in a process that `multiprocessing` has just spawned, without starting one.

Such a process has fresh random numbers, torch's own settings, and a `__main__` without what the
main code defined. Modules that are imported already keep their state.
"""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import spawn
from types import ModuleType
from typing import Any

import numpy as np
import torch

SPAWNED = "spawn"
"""The start method that a spawned process has itself."""
_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""The variables by which torch chooses its number of threads; the first one that is set counts."""
_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


@dataclass(frozen=True)
class TorchSettings:
    """The settings of torch that decide what is computed, without its number of threads.

    torch reads its variable when the number is first asked for, which the script may do later.
    """

    values: tuple[Any, ...]

    @staticmethod
    def now() -> TorchSettings:
        with _deprecations_ignored():
            return TorchSettings(tuple(_value(read) for read, _ in _settings()))

    def restore(self) -> None:
        with _deprecations_ignored():
            for (read, write), value in zip(_settings(), self.values, strict=True):
                if value is not None and _value(read) != value:
                    write(value)


def _settings() -> tuple[_Setting, ...]:
    """Reads and writes each setting. What a write changes besides comes after it."""
    cudnn: Any = torch.backends.cudnn
    precisions = (torch.backends, cudnn, torch.backends.cuda.matmul, cudnn.conv)
    return (
        *(_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
        _attribute(cudnn, "allow_tf32"),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        *(_attribute(owner, "fp32_precision") for owner in precisions),
        (torch.get_deterministic_debug_mode, _set_deterministic),
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_default_device, _set_default_device),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    )


def _attribute(owner: object, name: str) -> _Setting:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _set_deterministic(mode: int) -> None:
    torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)  # the compiler's, too


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # the CPU needs no context


def _value(read: Callable[[], Any]) -> Any:
    """None if torch refuses: both its old and its new functions for a precision were used."""
    with suppress(RuntimeError):
        return read()
    return None


@contextmanager
def _deprecations_ignored() -> Iterator[None]:
    """torch deprecates its old functions for a precision, but scripts use them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def as_new_process(
    settings: TorchSettings, environment: Mapping[str, str], main: Mapping[str, Any]
) -> Iterator[None]:
    """Inside, this process is like a new one with this environment; then it is as before.

    `settings`: of torch, before the main code ran. `main`: the preparation data by which
    `multiprocessing` finds the main module.
    """
    before = _State.now()
    try:
        _set_environment(environment)
        settings.restore()
        threads = next((environment[name] for name in _THREADS if name in environment), "")
        if threads.isdigit() and int(threads) not in (0, torch.get_num_threads()):
            torch.set_num_threads(int(threads))
        torch.seed()
        random.seed()
        np.random.seed()
        multiprocessing.set_start_method(SPAWNED, force=True)
        _import_main(main)
        yield
    finally:
        before.restore()


@dataclass(frozen=True)
class _State:
    """All that `as_new_process` changes."""

    environment: dict[str, str]
    settings: TorchSettings
    threads: int
    numbers: tuple[Any, ...]
    start_method: str
    main: ModuleType

    @staticmethod
    def now() -> _State:
        on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return _State(
            environment=dict(os.environ),
            settings=TorchSettings.now(),
            threads=torch.get_num_threads(),
            numbers=(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_gpus),
            start_method=multiprocessing.get_start_method(),
            main=sys.modules["__main__"],
        )

    def restore(self) -> None:
        sys.modules["__main__"] = self.main
        multiprocessing.set_start_method(self.start_method, force=True)
        pythons, numpys, torchs, on_gpus = self.numbers
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        self.settings.restore()
        _set_environment(self.environment)


def _set_environment(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _import_main(main: Mapping[str, Any]) -> None:
    """Import the script's main module under another name, as a spawned process does."""
    sys.modules["__main__"] = ModuleType("__main__")
    process = vars(multiprocessing.current_process())
    process["_inheriting"] = True  # what starts processes now is not guarded: Python refuses it
    try:
        spawn.prepare({name: main[name] for name in main if name.startswith("init_main_")})
    finally:
        del process["_inheriting"]
