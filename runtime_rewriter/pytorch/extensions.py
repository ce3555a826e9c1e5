"""Extension modules that may read tensors unseen.

A compiled module that uses torch's Python interface unpacks tensors from its arguments itself.
Nothing tells when it reads a parameter. Libraries of operators (`torch.ops`, as of torchvision) may
be linked to that interface but do not use it: torch passes them tensors, which is seen.
"""

from __future__ import annotations

import mmap
import sys
from functools import cache
from pathlib import Path

import torch

_UNPACKING = (b"THPVariable", b"type_casterIN2at6Tensor")
"""Symbols of torch/csrc/autograd/python_variable.h and torch/csrc/utils/pybind.h: every way to get
a tensor from a Python object names one of them."""
_MAPPED = Path("/proc/self/maps")
_TORCH = Path(torch.__file__).resolve().parent
"""As the memory map names it: an environment may be reached by a symbolic link."""
_ASKING = (("horovod", "torch", "mpi_lib_v2"),)
"""(folders and beginning of the name) of extensions whose callers ask every tensor for its type."""
_BUILDER = "torch.utils.cpp_extension"
"""Modules that it builds and loads are not in `sys.modules`."""


class LoadedExtensions:
    """Names the extensions that this process has loaded."""

    def __init__(self) -> None:
        self._modules = 0
        self._unseen: str | None = None

    def unseen(self) -> str | None:
        """The file name of an extension that may read tensors unseen, or None.

        Looks again only if modules were imported, or extensions may have been built.
        """
        if self._unseen is None and (len(sys.modules) != self._modules or _BUILDER in sys.modules):
            self._modules = len(sys.modules)
            self._unseen = next((Path(p).name for p in _loaded_files() if _reads_unseen(p)), None)
        return self._unseen


def _loaded_files() -> set[str]:
    """Shared objects in the memory of this process; without /proc, those of imported modules."""
    if _MAPPED.exists():
        lines = _MAPPED.read_text(errors="replace").splitlines()
        # address, permissions, offset, device, inode and path
        files = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    else:
        files = {str(getattr(module, "__file__", "")) for module in tuple(sys.modules.values())}
    return {file for file in files if file.endswith((".so", ".pyd"))}


@cache
def _reads_unseen(file: str) -> bool:
    """Whether it unpacks tensors from Python objects and is not torch's own."""
    path = Path(file).resolve()
    names = (*path.parts[-3:-1], path.name.partition(".")[0])
    if path.is_relative_to(_TORCH) or names in _ASKING:
        return False
    try:
        with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as data:
            return any(data.find(symbol) >= 0 for symbol in _UNPACKING)
    except (OSError, ValueError):  # gone since, or empty
        return False
