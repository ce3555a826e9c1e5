"""Training scripts that do what a late update could be seen by, one short function for each.

A script builds its model by `run.wrap`, trains it, and shows what it looks at by `run.see`. It must
see the same under every plan as under plain DDP.
"""

from __future__ import annotations

import copy
import ctypes
import io
import multiprocessing
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from ddp_pair import average_hook
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    parameters_to_vector,
    parametrizations,
    prune,
    vector_to_parameters,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, Dataset
from torch_world import seeded

STEPS = 7


class Run(Protocol):
    """What a script gets."""

    rank: int

    def wrap(self, module: nn.Module, **options: Any) -> Any:
        """The module under DDP."""

    def see(self, *values: Any) -> None:
        """Record values that the script looks at."""


Script = Callable[[Run], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.norm(self.a(x))))))


def data(run: Run, step: int) -> Tensor:
    return torch.randn(5, 6, generator=seeded(1000 * run.rank + step))


def loss_of(run: Run, model: Any, step: int) -> Tensor:
    return model(data(run, step)).square().mean()


def nothing(step: int) -> None:
    """Do nothing between two steps."""


def train(
    run: Run,
    model: Any,
    optimizer: Any,
    after: Callable[[int], object] = nothing,
    before: Callable[[int], object] = nothing,
    steps: int = STEPS,
) -> None:
    """`before` runs between backward() and step(), `after` after step()."""
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(run, model, step)
        loss.backward()
        before(step)
        optimizer.step()
        after(step)
        run.see(loss)


def sgd(model: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def adam(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), 0.01)


def plain_sgd(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, sgd(model))


def plain_adam(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, adam(model))


# -- communication hooks


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


# -- the optimizer's state


def momentum_reset(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)

    def reset(step: int) -> None:
        for state in optimizer.state.values():
            state["momentum_buffer"].zero_()

    train(run, model, optimizer, reset)


def state_cleared(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    train(run, model, optimizer, lambda step: optimizer.state.clear())


def state_replaced(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    train(run, model, optimizer, lambda step: setattr(optimizer, "state", defaultdict(dict)))


def moments_logged(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    first = next(model.parameters())
    train(run, model, optimizer, lambda step: run.see(optimizer.state[first]["exp_avg"].norm()))


def moments_logged_from_the_instance(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    first = next(model.parameters())
    train(run, model, optimizer, lambda step: run.see(vars(optimizer)["state"][first]["exp_avg"]))


def held(run: Run, take: Callable[[Any, Tensor], Any]) -> None:
    """What the script took from the optimizer after its third step is read after all others."""
    model = run.wrap(Net())
    optimizer = adam(model)
    first = next(model.parameters())
    kept: list[Any] = []

    def after(step: int) -> None:
        if step == 2:
            kept.append(take(optimizer, first))
        for value in kept:
            run.see(value)

    train(run, model, optimizer, after)


def moment_view(optimizer: Any, parameter: Tensor) -> Tensor:
    view: Tensor = optimizer.state[parameter]["exp_avg"].view(-1)
    return view


def moments_loaded(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    saved: list[Any] = []

    def after(step: int) -> None:
        if step == 3:
            saved.append(copy.deepcopy(optimizer.state_dict()))
        if step == 5:
            optimizer.load_state_dict(saved[0])

    train(run, model, optimizer, after)
    run.see(optimizer.state_dict())


def state_dict_loaded_unread(run: Run) -> None:
    """A state saved elsewhere replaces one that nobody reads."""
    model, other = run.wrap(Net()), run.wrap(Net())
    optimizer, source = adam(model), adam(other)
    train(run, other, source, steps=3)
    saved = copy.deepcopy(source.state_dict())
    train(run, model, optimizer, lambda step: optimizer.load_state_dict(saved))


def optimizer_pickled(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    train(run, model, optimizer, lambda step: run.see(copied_state(optimizer)))


def copied_state(optimizer: Any) -> Any:
    loaded = pickle.loads(pickle.dumps(optimizer))  # noqa: S301 - our own
    return loaded.state_dict(), copy.copy(optimizer).state_dict()["state"]


# -- other tensors on the memory of parameters and gradients


def alias(run: Run, take: Callable[[nn.Parameter], Any], module: Callable[[], Any] = Net) -> None:
    """Something that the script took from a parameter before training is read after every step."""
    model = run.wrap(module())
    first = next(model.parameters())
    taken = take(first)
    train(run, model, sgd(model), lambda step: run.see(torch.as_tensor(taken).clone()))


def earlier_state_dict(run: Run) -> None:
    model = run.wrap(Net())
    kept: dict[str, Tensor] = {}

    def after(step: int) -> None:
        if step == 2:
            kept.update(model.state_dict())
        run.see({name: value.sum() for name, value in kept.items()})

    train(run, model, adam(model), after)


def memory_by_address(run: Run) -> None:
    """Read through a storage that the script keeps."""
    model = run.wrap(Net())
    first = next(model.parameters())
    storage = first.untyped_storage()

    def read(step: int) -> None:
        raw = ctypes.string_at(storage.data_ptr(), storage.nbytes())
        run.see(torch.frombuffer(bytearray(raw), dtype=torch.float32))

    train(run, model, sgd(model), read)


def tied_through_data(run: Run) -> None:
    net = Net()
    net.b.weight.data = net.a.weight.data.new_empty(8, 8).normal_(generator=seeded(1))
    net.c = nn.Linear(8, 8)
    net.c.weight.data = net.b.weight.data
    model = run.wrap(net)
    train(run, model, sgd(model))


def shared_memory(run: Run) -> None:
    net = Net()
    net.share_memory()
    model = run.wrap(net)
    train(run, model, sgd(model), lambda step: run.see(in_a_process(net.a.weight)))


def gradient_view(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    first = next(model.parameters())
    views: list[Tensor] = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(run, model, step).backward()
        optimizer.step()
        if step == 2:
            assert first.grad is not None
            views.append(first.grad.view(-1))
        for view in views:
            run.see(view)


def data_replaced(run: Run) -> None:
    model = run.wrap(Net())
    first = next(model.parameters())

    def after(step: int) -> None:
        if step == 3:
            first.data = first.data.clone() * 0.5

    train(run, model, sgd(model), after)


# -- readers without Python


def scripted_validation(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    validate = script(net.b)
    train(run, model, sgd(model), lambda step: run.see(validate(torch.ones(2, 8))))


def script(what: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # still in use
        return torch.jit.script(what)


def total(x: Tensor) -> Tensor:
    return x.sum()


def scripted_function(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    function = script(total)
    train(run, model, sgd(model), lambda step: run.see(function(net.a.weight)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x[None])


def transformer_fast_path(run: Run) -> None:
    net = Encoder()
    model = run.wrap(net)

    def validate(step: int) -> None:
        net.eval()
        with torch.no_grad():
            run.see(net(data(run, 100 + step)))
        net.train()

    train(run, model, adam(model), validate)


def traced_validation(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def validate(step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(net.b, torch.ones(2, 8))
        run.see(traced(torch.ones(2, 8)))

    train(run, model, sgd(model), validate)


# -- parameters of another kind


class Named(nn.Parameter):
    """A parameter with a name of its own."""

    def __new__(cls, value: Tensor) -> Named:
        return torch.Tensor._make_subclass(cls, value, True)


def parameter_subclass(run: Run) -> None:
    net = Net()
    net.a.weight = Named(net.a.weight.detach().clone())
    model = run.wrap(net)
    train(run, model, adam(model))


class Loud(nn.Parameter):
    """Counts the functions that are called with it."""

    calls = 0

    def __new__(cls, value: Tensor) -> Loud:
        return torch.Tensor._make_subclass(cls, value, True)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def parameter_with_torch_function(run: Run) -> None:
    net = Net()
    net.c.weight = Loud(net.c.weight.detach().clone())
    model = run.wrap(net)
    train(run, model, sgd(model))


# -- averages and parametrizations


def ema(run: Run) -> None:
    model = run.wrap(Net())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(run, model, adam(model), lambda step: average.update_parameters(model.module))
    run.see(average.state_dict())


def ema_by_hand(run: Run) -> None:
    model = run.wrap(Net())
    average = {name: value.clone() for name, value in model.state_dict().items()}

    def after(step: int) -> None:
        for name, value in model.state_dict().items():
            average[name] = 0.9 * average[name] + 0.1 * value
        run.see(average)

    train(run, model, adam(model), after)


def swa(run: Run) -> None:
    model = run.wrap(Net())
    average = AveragedModel(model)
    train(run, model, sgd(model), lambda step: average.update_parameters(model))
    update_bn([data(run, step) for step in range(3)], average)
    run.see(average.state_dict())


def weight_norm(run: Run) -> None:
    net = Net()
    parametrizations.weight_norm(net.b)
    model = run.wrap(net)
    train(run, model, adam(model), lambda step: run.see(net.b.weight))


def old_weight_norm(run: Run) -> None:
    net = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(net.b)
    model = run.wrap(net)
    train(run, model, adam(model), lambda step: run.see(net.b.weight))


def spectral_norm(run: Run) -> None:
    net = Net()
    parametrizations.spectral_norm(net.b)
    model = run.wrap(net)
    train(run, model, adam(model), lambda step: run.see(net.b.weight))


def pruning(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def after(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                mask = net.b.weight.abs() > 0.1
                net.b.weight.mul_(mask)

    train(run, model, sgd(model), after)
    prune.l1_unstructured(net.c, "weight", 0.5)
    run.see(net.state_dict())


# -- gradients


def gradients_logged(run: Run) -> None:
    model = run.wrap(Net())

    def log(step: int) -> None:
        run.see([p.grad.norm() for p in model.parameters()])

    train(run, model, sgd(model), before=log)


def gradients_logged_now_and_then(run: Run) -> None:
    model = run.wrap(Net())

    def log(step: int) -> None:
        if step % 4 == 3:
            run.see([p.grad.norm() for p in model.parameters()])

    train(run, model, sgd(model), after=log, before=log)


def clipped_by_norm(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, sgd(model), before=lambda step: clip_grad_norm_(model.parameters(), 0.1))


def clipped_by_value(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, sgd(model), before=lambda step: clip_grad_value_(model.parameters(), 0.01))


def scaled(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(run, model, step)).backward()
        scaler.step(optimizer)
        scaler.update()


def zero_grad_to_zero(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss_of(run, model, step).backward()
        optimizer.step()


def zero_grad_of_the_model_after_the_step(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, adam(model), lambda step: model.zero_grad())


def gradients_dropped_by_hand(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)

    def drop(step: int) -> None:
        for number, parameter in enumerate(model.parameters()):
            if step % 3 == 2 and number % 2:
                parameter.grad = None

    train(run, model, optimizer, before=drop)


def accumulation(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        for part in range(2):
            with nullcontext() if part else model.no_sync():
                loss_of(run, model, 2 * step + part).backward()
        optimizer.step()
        optimizer.zero_grad()


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


# -- optimizers


def lbfgs(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=2)
    for step in range(STEPS):
        optimizer.step(partial(closure_of, run, model, optimizer, step))


def closure_of(run: Run, model: Any, optimizer: Any, step: int) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(run, model, step)
    loss.backward()
    return loss


def closure(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        run.see(optimizer.step(partial(closure_of, run, model, optimizer, step)))


def closure_midway(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    train(run, model, optimizer)
    for step in range(3):
        run.see(optimizer.step(partial(closure_of, run, model, optimizer, step)))


def step_none(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(run, model, step).backward()
        optimizer.step(None)


def several_optimizers(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    optimizers = [
        torch.optim.SGD(net.a.parameters(), 0.1, momentum=0.9),
        torch.optim.Adam([*net.norm.parameters(), *net.b.parameters()], 0.01),
        torch.optim.RMSprop(net.c.parameters(), 0.01),
    ]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(run, model, step).backward()
        for number, optimizer in enumerate(optimizers):
            if (step + number) % 3:
                optimizer.step()


def schedulers(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
    train(run, model, optimizer, lambda step: schedule.step())


def changed_hyperparameters(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)

    def after(step: int) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[0]["momentum"] = 0.1 * step

    train(run, model, optimizer, after)


def added_group(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    optimizer = torch.optim.SGD([*net.a.parameters(), *net.norm.parameters()], 0.1, momentum=0.9)

    def after(step: int) -> None:
        if step == 4:
            optimizer.add_param_group({"params": list(net.b.parameters()), "lr": 0.05})

    train(run, model, optimizer, after)


class Shrinking(torch.optim.SGD):
    """Overrides what its `step` calls."""

    def _init_group(self, group: Any, params: Any, *rest: Any) -> Any:
        found = super()._init_group(group, params, *rest)
        for parameter in params:
            parameter.grad.div_(float(len(params)))
        return found


def overridden_init_group(run: Run) -> None:
    model = run.wrap(Net())
    train(run, model, Shrinking(model.parameters(), 0.1, momentum=0.9))


def replaced_method(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    own = torch.optim.SGD._init_group
    optimizer._init_group = lambda group, params, *rest: shrunk(  # type: ignore[method-assign]
        own(optimizer, group, params, *rest), params
    )
    train(run, model, optimizer)


def shrunk(found: Any, params: Any) -> Any:
    for parameter in params:
        parameter.grad.div_(float(len(params)))
    return found


def replaced_step_under_a_scheduler(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)
    own = torch.optim.SGD.step

    def step(self: Any, closure: Any = None) -> Any:
        clip_grad_norm_(model.parameters(), 0.05)
        return own(self, closure)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(run, model, optimizer, lambda step: schedule.step())


def step_hooks(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = sgd(model)

    def clip(optimizer: Any, args: Any, kwargs: Any) -> None:
        run.see(clip_grad_norm_(model.parameters(), 0.1))

    optimizer.register_step_pre_hook(clip)
    train(run, model, optimizer)


# -- weights that the script writes


def clamped(run: Run) -> None:
    model = run.wrap(Net())

    def clamp(step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    train(run, model, sgd(model), clamp)


def frozen_midway(run: Run) -> None:
    net = Net()
    model = run.wrap(net, find_unused_parameters=True)

    def freeze(step: int) -> None:
        net.a.requires_grad_(step < 2 or step > 4)

    train(run, model, sgd(model), freeze)


def rewound(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)
    saved: list[Any] = []

    def after(step: int) -> None:
        if step == 2:
            saved.extend(copy.deepcopy([model.state_dict(), optimizer.state_dict()]))
        if step == 4:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    train(run, model, optimizer, after)


def vectors(run: Run) -> None:
    model = run.wrap(Net())

    def after(step: int) -> None:
        vector = parameters_to_vector(model.parameters())
        run.see(vector)
        if step == 3:
            vector_to_parameters(vector.detach().clone() * 0.9, model.parameters())

    train(run, model, sgd(model), after)


# -- other processes, threads and exceptions


class OfWeights(Dataset[Tensor]):
    """Its items come from the present weights, as in active learning."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return self.weight.detach().sum() + index


def data_loader_workers(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def epoch(step: int) -> None:
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        if step % 3 == 2:
            run.see(list(DataLoader(OfWeights(net.a.weight), num_workers=1, timeout=30)))

    train(run, model, sgd(model), epoch)


def forked(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def fork(step: int) -> None:
        if step % 3 == 2:
            run.see(in_a_process(net.a.weight))

    train(run, model, sgd(model), fork)


def in_a_process(tensor: Tensor) -> Any:
    """The values of `tensor` that a forked process sees, which must end."""
    # The ranks of these tests are daemons, which multiprocessing lets have no children.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=send_values, args=(sending, tensor))
    process.start()
    assert receiving.poll(30), "the forked process sent nothing"
    values = torch.tensor(receiving.recv())
    process.join(30)
    assert process.exitcode == 0, "the forked process has not ended"
    return values


def send_values(sending: Any, tensor: Tensor) -> None:
    sending.send(tensor.detach().flatten().tolist())


def read_in_a_thread(run: Run) -> None:
    model = run.wrap(Net())

    def read(step: int) -> None:
        with ThreadPoolExecutor(3) as readers:
            run.see(list(readers.map(Tensor.norm, list(model.parameters()), timeout=30)))

    train(run, model, sgd(model), read)


def forward_in_a_thread(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def validate(step: int) -> Tensor:
        with torch.no_grad():
            return net.b(torch.ones(2, 8))

    def after(step: int) -> None:
        with ThreadPoolExecutor(1) as other:
            run.see(other.submit(validate, step).result(30))

    train(run, model, sgd(model), after)


def forward_without_gradients(run: Run) -> None:
    model = run.wrap(Net())

    def validate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            run.see(model(data(run, 100 + step)))
        with torch.inference_mode():
            run.see(model(data(run, 200 + step)))
        model.train()

    train(run, model, sgd(model), validate)


def inner_forward_in_training_mode(run: Run) -> None:
    """A penalty whose gradient the script takes by itself."""
    net = Net()
    model = run.wrap(net)

    def probe(step: int) -> None:
        out = net.b(torch.ones(2, 8)).square().sum()
        run.see(torch.autograd.grad(out, list(net.b.parameters())))

    train(run, model, sgd(model), probe)


class Failing(Net):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.a(x))
        if self.fails:
            raise MemoryError
        return self.c(torch.relu(self.b(torch.relu(hidden))))


def failed_forward(run: Run) -> None:
    net = Failing()
    model = run.wrap(net)

    def fail(step: int) -> None:
        if step % 3 == 2:
            net.fails = True
            with suppress(MemoryError):
                model(data(run, 50))
            net.fails = False

    train(run, model, sgd(model), fail)


def failed_loss(run: Run) -> None:
    """A batch is given up between the forward and the backward pass."""
    model = run.wrap(Net())
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        with suppress(ZeroDivisionError):
            loss = loss_of(run, model, step)
            if step % 3 == 2:
                raise ZeroDivisionError
            loss.backward()
            optimizer.step()
        run.see(next(model.parameters()))


# -- copies and transforms


def saved_after_the_step(run: Run) -> None:
    model = run.wrap(Net())
    optimizer = adam(model)

    def save(step: int) -> None:
        saved = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        saved.seek(0)
        run.see(torch.load(saved, weights_only=True))

    train(run, model, optimizer, save)


def deep_copies(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    optimizer = adam(model)

    def after(step: int) -> None:
        run.see(copy.deepcopy(net).state_dict())
        if step == 4:
            copied, its_optimizer = copy.deepcopy((net, optimizer))
            run.see(its_optimizer.state_dict(), copied.a.weight)

    train(run, model, optimizer, after)


class Transforming(Net):
    """Differentiates by its own parameters before it reads them."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.a(x)))
        values = dict(self.b.named_parameters())

        def output(values: Any) -> Tensor:
            return torch.func.functional_call(self.b, values, (hidden,)).square().mean()

        slope = torch.func.grad(output)(values)["bias"].detach()
        return self.c(self.b(hidden)) * (1 + 0.01 * slope.norm())


def transforms_in_the_forward_pass(run: Run) -> None:
    model = run.wrap(Transforming())
    train(run, model, sgd(model))


def functional(run: Run) -> None:
    net = Net()
    model = run.wrap(net)

    def after(step: int) -> None:
        parameters = dict(net.b.named_parameters())

        def loss(values: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(net.b, values, (x,)).square().sum()

        run.see(torch.func.grad(loss)(parameters, torch.ones(2, 8)))
        run.see(torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.ones(3, 2, 8)))

    train(run, model, sgd(model), after)


def printed(run: Run) -> None:
    net = Net()
    model = run.wrap(net)
    show = lambda step: run.see(list(repr(net.a.weight).encode()), net.a.bias.tolist())  # noqa: E731
    train(run, model, sgd(model), show)


ODD_SCRIPTS: dict[str, Script] = {
    **{
        function.__name__: function
        for function in tuple(vars().values())
        if getattr(function, "__annotations__", {}) == {"run": "Run", "return": "None"}
    },
    "held state": partial(held, take=lambda optimizer, parameter: optimizer.state),
    "held state of a parameter": partial(held, take=lambda optimizer, p: optimizer.state[p]),
    "held moment": partial(held, take=lambda optimizer, p: optimizer.state[p]["exp_avg"]),
    "held view of a moment": partial(held, take=moment_view),
    "held state_dict": partial(held, take=lambda optimizer, p: optimizer.state_dict()),
    "flat view": partial(alias, take=lambda parameter: parameter.detach().view(-1)),
    "data": partial(alias, take=lambda parameter: parameter.data),
    "array": partial(alias, take=lambda parameter: parameter.detach().numpy()),
    "DLPack": partial(alias, take=lambda p: torch.from_dlpack(p.detach())),
}
