"""Count the bytes of torch's allocator exactly, current and highest, over all threads.

On the CPU, torch's profiler reports allocations only of threads that it knows. It misses those of a
Python thread (a lane), and counts memory that another thread frees for ever. This counter is an
allocator in front of c10's default one (`c10::SetCPUAllocator`), compiled on first use with the
machine's C++ compiler. Kernels' own scratch memory (oneDNN, gloo's buffers) is not c10's.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_suffix(".cpp")


class AllocatorCounter:
    """Counts on the CPU. Install it before the first tensor: it does not know older memory."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("current_bytes", "peak_bytes"):
            getattr(self._library, name).restype = ctypes.c_int64
        self._library.install()

    @property
    def current_bytes(self) -> int:
        return int(self._library.current_bytes())

    @property
    def peak_bytes(self) -> int:
        """The highest number since the last `reset`."""
        return int(self._library.peak_bytes())

    def reset(self) -> None:
        self._library.reset_peak()


class DeviceCounter:
    """Counts on a GPU, by torch's caching allocator. New tensors are allocated there."""

    def __init__(self) -> None:
        torch.set_default_device("cuda")

    @property
    def peak_bytes(self) -> int:
        """The highest number since the last `reset`."""
        return torch.cuda.max_memory_allocated()

    def reset(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def build(folder: Path) -> Path:
    """Compile the library into `folder`.

    Raises `subprocess.CalledProcessError`, or `FileNotFoundError` without a compiler.
    """
    root = Path(torch.__file__).parent
    library = folder / "c10_memory.so"
    words = [
        "-O1",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-I{root / 'include'}",
        str(SOURCE),
        "-o",
        str(library),
        f"-L{root / 'lib'}",
        "-lc10",
    ]
    subprocess.run(["c++", *words], check=True, stdout=sys.stderr, timeout=300)
    return library


def built() -> Path:
    """Compile the library into a new temporary folder."""
    return build(Path(tempfile.mkdtemp(prefix="c10-memory-")))
