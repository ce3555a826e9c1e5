"""What-ifs are enacted on an unmodified script exactly as their line of code would, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.errors import InvalidInput
from runtime_rewriter.changes.enact import enacted
from runtime_rewriter.changes.settings import ENACTABLE, CheckSettings


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Blur(nn.Module):
    """A transform of images as a data loader calls it: a module in training mode, no parameters."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(images, torch.full((3, 1, 3, 3), 0.1), padding=1, groups=3)


def trained(
    *,
    fused: bool | None = None,
    foreach: bool | None = None,
    autocast: bool = False,
    channels_last: bool = False,
    wrap: bool = True,
    blurred: bool = False,
) -> dict[str, torch.Tensor]:
    """The weights of a small network after three steps, with the changes as lines of a script."""
    torch.manual_seed(0)
    network: nn.Module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 5)
    )
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    if channels_last:
        network = cast(Any, network).to(memory_format=torch.channels_last)
    model = DistributedDataParallel(network) if wrap else network
    blur = Blur()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, foreach=foreach)
    for _ in range(3):
        optimizer.zero_grad()
        batch = blur(images) if blurred else images
        if channels_last:
            batch = batch.to(memory_format=torch.channels_last)
        with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
            loss = nn.functional.cross_entropy(model(batch), labels)
        loss.backward()
        optimizer.step()
    network.eval()
    with torch.no_grad():
        assert network(images).dtype == torch.float32  # validation does not change
    return {name: value.clone() for name, value in network.state_dict().items()}


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ("fused_adam", {"fused": True}),
        ("foreach_optimizer", {"foreach": True}),
        ("for_each_optimizer", {"foreach": False}),
        ("amp", {"autocast": True}),
        ("channels_last", {"channels_last": True}),
    ],
)
def test_a_change_from_outside_trains_like_the_line_in_the_script(change, lines, wrap) -> None:
    by_line = trained(**lines, wrap=wrap)
    with enacted((change,), {}) as state:
        from_outside = trained(wrap=wrap)
        state.check()
    assert_equal_weights(from_outside, by_line)
    plain = trained(wrap=wrap)
    assert_equal_weights(plain, trained(wrap=wrap))  # everything is restored
    if change == "amp":
        assert not torch.equal(plain["4.weight"], by_line["4.weight"])


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize(
    ("change", "lines"),
    [("amp_cpu", {"autocast": True}), ("channels_last", {"channels_last": True})],
)
def test_a_transform_of_images_is_not_taken_for_the_model(change, lines, wrap) -> None:
    by_line = trained(**lines, wrap=wrap, blurred=True)
    with enacted((change,), {}) as state:
        from_outside = trained(wrap=wrap, blurred=True)
        state.check()
    assert_equal_weights(from_outside, by_line)


def test_amp_without_a_model_that_trains_is_refused() -> None:
    with enacted(("amp",), {}) as state:
        Blur()(torch.zeros(1, 3, 4, 4))
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(InvalidInput, match=r"called no module .* has trainable parameters"):
        state.check()


def test_changes_combine() -> None:
    by_line = trained(fused=True, autocast=True)
    with enacted(("amp", "fused_adam"), {}) as state:
        from_outside = trained()
        state.check()
    assert_equal_weights(from_outside, by_line)


def test_buckets_and_the_dtype_of_gradients_are_those_of_the_wrapper() -> None:
    with enacted(("bucket_size", "fp16_gradients"), {"bucket_size": 50.0}) as state:
        model = DistributedDataParallel(nn.Linear(3, 3))
        state.check()
    assert model.bucket_bytes_cap == 50 * 2**20
    (hook,) = [hook for hook, _ in model._comm_hooks]
    assert hook.__name__ == "fp16_compress_hook"
    assert DistributedDataParallel(nn.Linear(3, 3)).bucket_bytes_cap == 25 * 2**20


@pytest.mark.parametrize("stated", ["fused", "foreach"])
def test_a_script_that_chooses_the_implementation_is_refused(stated) -> None:
    weight = nn.Parameter(torch.zeros(2))
    with (
        enacted(("fused_adam",), {}),
        pytest.raises(InvalidInput, match=f"the script states {stated}=False for SGD"),
    ):
        torch.optim.SGD([weight], lr=0.1, **{stated: False})


def test_a_change_without_effect_is_refused() -> None:
    table = nn.Embedding(3, 3, sparse=True)
    with enacted(("fused_adam", "bucket_size"), {"bucket_size": 1.0}) as state:
        torch.optim.SparseAdam(list(table.parameters()))
    with pytest.raises(InvalidInput, match=r"builds no optimizer .* fused; .*Adam, .*SGD"):
        state.check()
    with enacted(("channels_last",), {}) as state:
        nn.Linear(2, 2)(torch.zeros(1, 2))
    with pytest.raises(InvalidInput, match="no parameter of its model has four dimensions"):
        state.check()


def test_a_script_under_autocast_is_refused() -> None:
    layer = nn.Linear(2, 2)
    with (
        enacted(("amp",), {}),
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InvalidInput, match="the script does so itself"),
    ):
        layer(torch.zeros(1, 2))


def test_amounts_and_names_are_checked() -> None:
    with pytest.raises(InvalidInput, match="bucket_size needs an amount in MiB"):
        enacted(("bucket_size",), {}).__enter__()
    with pytest.raises(InvalidInput, match="'vdnn' needs a change of the script itself"):
        CheckSettings("", ("vdnn",))
    assert CheckSettings("", ENACTABLE).changes == ENACTABLE
