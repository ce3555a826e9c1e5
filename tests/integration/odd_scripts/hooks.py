"""Scripts with hooks: communication hooks of DDP, hooks on tensors, modules and steps."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from ddp_pair import average_hook
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.utils import clip_grad_norm_

from odd_scripts.basics import Net, Run, sgd, train


def own_communication_hook(run: Run) -> None:
    model = run.wrap(Net())
    model.register_comm_hook(None, average_hook)
    train(run, model, sgd(model))


def builtin_communication_hook(run: Run) -> None:
    model = run.wrap(Net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(run, model, sgd(model))


def power_sgd_hook(run: Run) -> None:
    model = run.wrap(Net())
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(run, model, sgd(model))


def tensor_hooks(run: Run) -> None:
    model = run.wrap(Net())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    train(run, model, sgd(model))


def post_accumulate_hooks(run: Run) -> None:
    """They change gradients before DDP averages them."""
    model = run.wrap(Net())
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(double)
    train(run, model, sgd(model))


def double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def post_accumulate_hooks_midway(run: Run) -> None:
    model = run.wrap(Net())

    def after(step: int) -> None:
        if step == 3:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(double)

    train(run, model, sgd(model), after)


def module_hooks(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def read_weight(module: nn.Linear, inputs: Any, output: Any) -> None:
        run.see(module.weight.norm(), output)

    def read_gradient(module: nn.Module, of_inputs: Any, of_outputs: Any) -> None:
        run.see(of_outputs)

    net.b.register_forward_hook(read_weight)
    net.b.register_full_backward_hook(read_gradient)
    train(run, model, sgd(model))


def step_hooks(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        run.see(clip_grad_norm_(model.parameters(), 0.1))

    optimizer.register_step_pre_hook(clip)
    train(run, model, optimizer)
