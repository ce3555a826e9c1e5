"""The models of the memory benchmarks, which are those of the examples."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from benchmarks.memory_accuracy import models
from benchmarks.memory_accuracy.__main__ import MODELS


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """The models import the examples as modules of their own names."""
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() & set(MODELS):
        if name not in before:
            del sys.modules[name]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_makes_a_step(name: str) -> None:
    torch.manual_seed(0)
    job = getattr(models, name)()
    before = [parameter.detach().clone() for parameter in job.module.parameters()]
    job.step(job.module)
    after = job.module.parameters()
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
