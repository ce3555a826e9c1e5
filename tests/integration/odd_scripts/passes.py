"""Scripts with several forward or backward passes in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from odd_scripts.basics import STEPS, Net, Run, adam, data, loss_of, sgd

Other = Callable[[Net], Tensor]


class TwoHeads(nn.Module):
    """Two outputs; with a shared trunk, or of disjoint parts."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 8) if shared else nn.Identity()
        width = 8 if shared else 6
        self.first, self.second = nn.Linear(width, 3), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x)
        return self.first(hidden).tanh(), self.second(hidden).tanh()


def with_another_pass(run: Run, net: Net, optimizer: Any, model: Any, other: Other) -> None:
    """The graph of `other` is built before the backward pass, outside the model."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        value = other(net)
        loss.backward()
        if step > 3:
            value.backward()
        optimizer.step()
        run.see(loss)


def penalty_with_a_pass_of_its_own(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def penalty(net: Net) -> Tensor:
        return 0.01 * torch.stack([p.abs().sum() for p in net.parameters()]).sum()

    with_another_pass(run, net, sgd(model), model, penalty)


def part_of_the_model_with_a_pass_of_its_own(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    with_another_pass(run, net, adam(model), model, lambda net: net.c(torch.ones(2, 8)).sum())


def no_sync_between_forward_and_backward(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(run, model, 2 * step)
        with model.no_sync():
            other = loss_of(run, model, 2 * step + 1)
        loss.backward(retain_graph=True)
        run.see(loss, other)
        optimizer.step()


def no_sync_after_an_unused_forward(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step % 3 == 1:
            run.see(loss_of(run, model, step))
        with model.no_sync():
            loss = loss_of(run, model, step)
        loss.backward()
        if step % 3 != 1:
            loss_of(run, model, step).backward()
        optimizer.step()


def heads_with_passes_of_their_own(run: Run) -> None:
    model = run.wrap(TwoHeads(shared=False))
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        first, second = model(data(run, step))
        first.square().mean().backward()
        second.square().mean().backward()
        optimizer.step()
        run.see(first, second)


def one_head_at_a_time(run: Run) -> None:
    model = run.wrap(TwoHeads(shared=True), find_unused_parameters=True)
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(data(run, step))[step % 2].square().mean().backward()
        run.see([p.grad is None for p in model.parameters()])
        optimizer.step()


def heads_that_ddp_refuses(run: Run) -> None:
    """With unused parameters found, the first backward pass ends that of both heads."""
    model = run.wrap(TwoHeads(shared=False), find_unused_parameters=True)
    first, second = model(data(run, 0))
    first.square().mean().backward()
    try:
        second.square().mean().backward()
        run.see("no error")
    except RuntimeError as error:
        run.see("second time" in str(error))


class Manual(nn.Module):
    """Lightning's module with manual optimization: the forward pass of DDP makes whole steps."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.step: Callable[[Tensor], None]

    def forward(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        self.step(loss)
        return loss.detach()


def backward_inside_the_forward_pass(run: Run) -> None:
    """As `lightning.pytorch.overrides.distributed.prepare_for_backward` and its callers do."""
    net = Manual()
    model = run.wrap(net)
    optimizer = sgd(model)

    def make_step(loss: Tensor) -> None:
        optimizer.zero_grad()
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        loss.backward()
        optimizer.step()
        model.require_backward_grad_sync = False

    net.step = make_step
    for step in range(STEPS):
        run.see(model(data(run, step)))
        model.require_backward_grad_sync = True


class Keeping(nn.Module):
    """Keeps what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.layer(x)
        return self.kept


def changed_output(run: Run) -> None:
    net = Keeping()
    model = run.wrap(net, find_unused_parameters=True)
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(data(run, step)).div_(10)
        run.see(output, net.kept)
        (output.sum() + net.kept.square().mean()).backward()
        optimizer.step()


def one_optimizer_of_two_models(run: Run) -> None:
    first, second = run.wrap(Net()), run.wrap(Net())
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], 0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss_of(run, first, step) + loss_of(run, second, step)).backward()
        optimizer.step()
        first.eval()
        with torch.no_grad():
            run.see(first(data(run, step)))
        first.train()
        # Kept by no name: what the script holds of the state does not cross the step.
        run.see([state["exp_avg"] for state in optimizer.state_dict()["state"].values()])
