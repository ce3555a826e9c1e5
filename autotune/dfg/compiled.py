"""Compiling a kernel with numba: once per machine where a folder can be written, once per process where none can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., object])
_njit: Any = numba.njit  # its stubs do not know all of its options


def compiled(**options: bool) -> Callable[[Kernel], Kernel]:
    """A decorator: compile on the first call and keep the machine code beside the source or in the user's cache folder.

    Kernels release the interpreter's lock. numba refuses to import where neither folder can be written; then nothing is kept.
    """

    def compile_one(function: Kernel) -> Kernel:
        try:
            kernel: Kernel = _njit(cache=True, nogil=True, **options)(function)
        except RuntimeError:
            kernel = _njit(nogil=True, **options)(function)
        return kernel

    return compile_one


def inner(function: Kernel) -> Kernel:
    """A decorator: a part of a kernel, which only compiled code of the same file calls. It is kept with the kernel."""
    part: Kernel = _njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return part
