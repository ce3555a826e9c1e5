"""The buckets of the current setup as a profile names them: those that DDP will have."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from runtime_rewriter.pytorch.ddp import PlannedDataParallel


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 2}, {"find_unused_parameters": True}])
def test_they_are_known_before_the_reducer_rebuilds_them(one_rank, options) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    ddp = PlannedDataParallel(model, **options)
    assert isinstance(ddp, DistributedDataParallel)
    synchronizer = ddp.synchronizer
    ready = [name for name, _ in reversed(list(model.named_parameters()))]
    before = synchronizer.backend.own_buckets()
    expected = synchronizer.backend.rebuilt_buckets(ready)
    for _ in range(3):
        ddp(torch.ones(2, 512)).sum().backward()
    after = synchronizer.backend.own_buckets()
    assert after is not None and expected is not None and before is not None
    assert [set(bucket) for bucket in expected] == [set(bucket) for bucket in after]
    assert synchronizer.backend.rebuilt_buckets(ready) == after
    assert (before == after) is bool(options.get("find_unused_parameters"))
