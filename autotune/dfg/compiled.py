"""Compile kernels with numba, with a cache on disk if a folder for it is writable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

Kernel = TypeVar("Kernel", bound=Callable[..., object])
_njit: Any = numba.njit  # its stubs do not know all of its options


def compiled(*, allocates: bool) -> Callable[[Kernel], Kernel]:
    """Decorate a kernel: compile it on the first call and release the interpreter's lock in it.

    `allocates`: whether the kernel creates arrays. Only then does it count references to arrays. In
    the event loop of the replay, counting took nine tenths of the time.

    The machine code is kept next to the source or in the user's cache folder. numba refuses to
    import if it can write to neither; then nothing is kept.
    """

    def compile_one(function: Kernel) -> Kernel:
        try:
            kernel: Kernel = _njit(cache=True, nogil=True, _nrt=allocates)(function)
        except RuntimeError:
            kernel = _njit(nogil=True, _nrt=allocates)(function)
        return kernel

    return compile_one


def inner(function: Kernel) -> Kernel:
    """Decorate a part of a kernel, which creates no array and is called in the same file only.

    It becomes a part of its callers' code: a call would copy the description of each array.
    """
    decorate = _njit(
        nogil=True, _nrt=False, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
    )
    part: Kernel = decorate(function)
    return part
