"""PlannedDataParallel is a DDP, and torch's class is always restored."""

import copy
import inspect
import io
import warnings
from contextlib import suppress
from typing import Any

import pytest
import torch
from ddp_pair import HOOKED, average_hook, pair
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision
from torch_plans import Tied, loss_of, mixed, uniform
from torch_world import on_ranks

from autotune.errors import InvalidStrategy
from runtime_rewriter.pytorch.ddp import PlannedDataParallel, replaced_ddp
from runtime_rewriter.pytorch.hooks import GradientSynchronizer

CHANGED = "forward __init__ __getstate__ _inside_ddp_forward _run_ddp_forward join_hook"
CHANGED += " _distributed_broadcast_coalesced register_comm_hook _register_builtin_comm_hook"
CHANGED += " _set_static_graph"
OF_EVERY_CLASS = "__doc__ __module__ __abstractmethods__ __annotations__ _abc_impl"


def test_every_name_of_ddp_is_inherited_unchanged_but_the_documented_few() -> None:
    for name in set(dir(DistributedDataParallel)) - {*CHANGED.split(), *OF_EVERY_CLASS.split()}:
        classes = (PlannedDataParallel, DistributedDataParallel)
        mine, theirs = (inspect.getattr_static(one, name) for one in classes)
        assert mine is theirs, name


@on_ranks(2)
def test_the_public_surface_of_ddp_works_with_and_without_a_plan(rank: int) -> None:
    theirs, mine = pair(Tied())
    mine.synchronizer.load(mixed(mine.module, 2))
    for model in (theirs, mine):
        loss_of(model, rank, 0).backward()
    missing = [name for name in dir(theirs) if not hasattr(mine, name)]
    assert not missing
    assert isinstance(mine, DistributedDataParallel)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert all(key.startswith("module.") for key in mine.state_dict())
    assert mine.require_backward_grad_sync
    with mine.no_sync():
        assert not mine.require_backward_grad_sync
    mine.synchronizer.load(None)
    mine.register_comm_hook(None, average_hook)
    loss_of(mine, rank, 2).backward()
    assert HOOKED, "without a plan the user's own communication hook runs"
    HOOKED.clear()
    with pytest.raises(InvalidStrategy, match="the script registered a communication hook"):
        mine.synchronizer.load(uniform(mine.module, 2))
    loss_of(mine, rank, 2).backward()
    assert HOOKED, "its plan being refused, the model trains as before"
    clone = copy.deepcopy(mine)
    with pytest.raises(InvalidStrategy, match="wrap the module again"):
        clone.synchronizer.load(None)
    loss_of(clone, rank, 3).backward()


@on_ranks(2)
def test_ddp_itself_handles_uneven_inputs_under_join(rank: int) -> None:
    """Uneven inputs, the plan loaded before the context."""
    torch.manual_seed(0)
    theirs, mine = pair(Tied())
    mine.synchronizer.load(uniform(mine.module, 2))
    for model in (theirs, mine):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.join():
            for step in range(2 + rank):
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(InvalidStrategy, match="join"):
        mine.synchronizer.load(uniform(mine.module, 2))


class ScriptSession:
    def __init__(self) -> None:
        self.built: list[GradientSynchronizer] = []

    def model_built(self, synchronizer: GradientSynchronizer) -> None:
        self.built.append(synchronizer)


@on_ranks(2)
def test_the_replaced_class_reports_to_the_session_and_saves_as_torchs_own(rank: int) -> None:
    session = ScriptSession()
    with replaced_ddp(session, timeout_s=7.0):
        model = torch.nn.parallel.DistributedDataParallel(Tied())
        assert type(model) is torch.nn.parallel.distributed.DistributedDataParallel
        stored = io.BytesIO()
        torch.save(model, stored)
    assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel
    assert torch.nn.parallel.distributed.DistributedDataParallel is DistributedDataParallel
    assert session.built == [model.synchronizer] and isinstance(model, DistributedDataParallel)
    assert isinstance(model.synchronizer, GradientSynchronizer)
    model.synchronizer.load(uniform(model.module, 2))
    loss_of(model, rank, 0).backward()
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    assert type(loaded) is DistributedDataParallel, "a saved model opens where nothing is replaced"


def test_the_class_is_restored_when_the_script_fails() -> None:
    with suppress(KeyError), replaced_ddp(ScriptSession()):
        assert torch.nn.parallel.DistributedDataParallel is not DistributedDataParallel
        raise KeyError
    assert torch.nn.parallel.DistributedDataParallel is DistributedDataParallel


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, scale: float) -> dict[str, Any]:
        return {"logits": [self.layer(x) * scale], "scale": scale}


@on_ranks(2)
def test_outputs_in_containers_and_a_compiled_model_are_synchronized(rank: int) -> None:
    torch.manual_seed(0)
    mine = PlannedDataParallel(Dictionary())
    mine.synchronizer.load(uniform(mine.module, 2, groups=1))
    mine(torch.full((1, 3), float(rank)), scale=2.0)["logits"][0].sum().backward()
    assert torch.equal(mine.module.layer.weight.grad, torch.full((3, 3), 1.0))
    compiled = torch.compile(mine, backend="eager")
    compiled(torch.full((1, 3), float(rank)), scale=2.0)["logits"][0].sum().backward()
    assert torch.equal(mine.module.layer.weight.grad, torch.full((3, 3), 2.0))


@on_ranks(2, each=[False, True])
def test_an_optimizer_moved_into_the_backward_pass_under_a_plan_is_refused(
    rank: int, native: bool
) -> None:
    """`_apply_optimizer_in_backward` after wrapping, which DDP alone would look for once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = PlannedDataParallel(Tied())
    model.synchronizer.load((uniform if native else mixed)(model.module, 2))
    assert (model.synchronizer.native is not None) == native
    loss_of(model, rank, 0).backward()
    _apply_optimizer_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 0.1})
    with pytest.raises(InvalidStrategy, match="runs inside the backward pass"):
        loss_of(model, rank, 1)
    with pytest.raises(InvalidStrategy, match="runs inside the backward pass"):
        model.synchronizer.load(uniform(model.module, 2))


@on_ranks(2)
def test_uses_of_ddp_that_forbid_plans_are_named(rank: int) -> None:
    """Uses of DDP that forbid plans: loading one names the use, and DDP itself continues."""
    hooked = PlannedDataParallel(Tied())
    hooked._register_buffer_comm_hook(None, lambda state, buffers: None)
    module = Tied()
    # Attributes that torch.distributed.optim leaves; its import warns.
    module.gain.__dict__["_in_backward_optimizers"] = [torch.optim.SGD([module.gain], 0.1)]
    fused = PlannedDataParallel(module)
    module = Tied()
    delayed = PlannedDataParallel(
        module,
        delay_all_reduce_named_params=[("gain", module.gain)],
        param_to_hook_all_reduce=module.mix.weight,
    )
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        compiled = PlannedDataParallel(Tied())
    narrow = PlannedDataParallel(Tied(), mixed_precision=_MixedPrecision(param_dtype=torch.float32))
    reasons = (
        (hooked, "a hook for buffers"),
        (fused, "inside the backward pass"),
        (delayed, "delay_all_reduce_named_params"),
        (compiled, "optimize_ddp is 'python_reducer'"),
        (narrow, "built with mixed_precision; use torch.autocast"),
    )
    for model, reason in reasons:
        with pytest.raises(InvalidStrategy, match=reason):
            model.synchronizer.load(uniform(model.module, 2))
        assert model.synchronizer.plan is None
