"""Notices calls that read parameters unseen.

TorchScript, function transforms (`torch.func`) and the C++ fast path of an evaluating
`nn.TransformerEncoder` read parameters without any Python function that could be watched, or
compute in another way if they are watched; a trace records how they are read. So everything is
flushed before a scripted function, a method of a scripted module or a transform runs, and before a
scripted module is saved or copied. Outside the model's own forward pass, so it is before a scripted
module or one with parameters of ours that evaluates or is being traced. The same holds before a
CUDA graph is captured or replayed, where the script switches `__torch_function__` off, before
another backward pass, where autograd adds to a gradient in C++, and before torch.compile traces.
Inside the forward pass that learns the reads, the parameters of such a module count as unseen.
Functions that copy the values of any argument (`torch.tensor`) look for watched ones among them.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch._dynamo import trace_rules
from torch._functorch import eager_transforms
from torch._functorch import vmap as vmap_transform
from torch.jit._builtins import _get_builtin_table
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import dlpack
from torch.utils.hooks import RemovableHandle

from runtime_rewriter.pytorch.reads import noticing


class UnseenModules:
    """Calls `on_call(module)` before calls of modules that read some of the parameters with these
    `identities` unseen, while watching."""

    def __init__(self, identities: Collection[int], on_call: Callable[[nn.Module], None]) -> None:
        self._identities, self._on_call = identities, on_call
        self._handle: RemovableHandle | None = None

    def watch(self) -> None:
        if self._handle is None:
            self._handle = register_module_forward_pre_hook(self._before)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _before(self, module: nn.Module, _: Any) -> None:
        scripted = isinstance(module, torch.jit.ScriptModule)
        evaluating = not (module.training and torch.is_grad_enabled())
        tracing = torch._C._get_tracing_state() is not None
        if scripted or ((evaluating or tracing) and self._has_ours(module)):
            self._on_call(module)

    def _has_ours(self, module: nn.Module) -> bool:
        return any(id(parameter) in self._identities for parameter in module.parameters())


_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    (torch._C.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
    (torch.jit.RecursiveScriptModule, "save"),
    (torch.jit.RecursiveScriptModule, "save_to_buffer"),
    (torch.jit.RecursiveScriptModule, "_save_for_lite_interpreter"),
    (torch.jit.RecursiveScriptModule, "_save_to_buffer_for_lite_interpreter"),
    (torch.jit.RecursiveScriptModule, "__deepcopy__"),
    (torch._C, "_freeze_module"),
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
    (eager_transforms, "_func_increment_nesting"),
    (vmap_transform, "vmap_increment_nesting"),
    (torch._C, "DisableTorchFunction"),
    (torch._C, "DisableTorchFunctionSubclass"),
    (torch.autograd, "_engine_run_backward"),
    (torch.cuda.CUDAGraph, "capture_begin"),
    (torch.cuda.CUDAGraph, "replay"),
    (signal, "signal"),
    (signal, "getsignal"),
    (trace_rules, "lookup_inner"),
)
"""Functions that run before tensors are read unseen, or a script looks at its signal handlers.

The last one is called before torch.compile traces a frame. With everything flushed, the functions
are torch's own again when it lists those that it knows, once for the process.
"""
_COPYING: tuple[tuple[Any, str], ...] = (
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
    (torch.Tensor, "new_tensor"),
    (dlpack, "to_dlpack"),
    (torch._C, "_to_dlpack"),
)
"""Functions that copy the values of their arguments without asking them."""
_REPLACED = _FUNCTIONS + _COPYING
_READS_NONE = "torch.autograd.profiler"
"""The module that calls one of them around every step of an optimizer, and reads no tensor."""
_CALLS_MODULES = "torch.nn.modules.module"


class UnseenFunctions:
    """Calls `on_call()` before any function that takes tensors without asking them, while
    watching."""

    _watching: list[UnseenFunctions] = []
    _own: tuple[Any, ...] = ()
    _ours: tuple[Any, ...] = ()

    def __init__(self, on_call: Callable[[], None]) -> None:
        self._on_call = on_call

    def watch(self) -> None:
        everyone = UnseenFunctions._watching
        if not everyone:
            _get_builtin_table()  # built from torch's functions, which are replaced here
            replace = [_announced] * len(_FUNCTIONS) + [noticing] * len(_COPYING)
            UnseenFunctions._own = tuple(getattr(place, name) for place, name in _REPLACED)
            originals = zip(UnseenFunctions._own, replace, strict=True)
            UnseenFunctions._ours = tuple(replacement(own) for own, replacement in originals)
            for (place, name), ours in zip(_REPLACED, UnseenFunctions._ours, strict=True):
                setattr(place, name, ours)
        if self not in everyone:
            everyone.append(self)

    def stop(self) -> None:
        everyone = UnseenFunctions._watching
        if self in everyone:
            everyone.remove(self)
            if not everyone:
                _restore()


def _restore() -> None:
    """Put torch's functions back, except where the script has put its own since."""
    replaced = zip(_REPLACED, UnseenFunctions._own, UnseenFunctions._ours, strict=True)
    for (place, name), own, ours in replaced:
        if getattr(place, name) is ours:
            setattr(place, name, own)


def _needs_no_flush(caller: FrameType) -> bool:
    """Whether a call reads nothing, or is that of a scripted module, which `UnseenModules` notices.

    Another module calls a scripted function that the script has made its `forward`.
    """
    name = caller.f_globals.get("__name__")
    if name == _CALLS_MODULES:
        return isinstance(caller.f_locals.get("self"), torch.jit.ScriptModule)
    return bool(name == _READS_NONE)


def _announced(own: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _needs_no_flush(sys._getframe(1)):
            for watching in tuple(UnseenFunctions._watching):
                watching._on_call()
        return own(*args, **kwargs)

    return call
