"""Functions that read tensors unseen are announced while variables are watched."""

from __future__ import annotations

import pytest
import torch

from runtime_rewriter.pytorch.unseen_calls import UnseenFunctions


@pytest.mark.parametrize("name", ["capture_begin", "replay"])
def test_a_cuda_graph_is_announced_before_it_is_captured_or_replayed(name: str) -> None:
    """The call itself fails without a graph; it comes after the announcement."""
    announced: list[str] = []
    unseen = UnseenFunctions(lambda: announced.append(name))
    original = getattr(torch.cuda.CUDAGraph, name)
    unseen.watch()
    try:
        with pytest.raises((TypeError, RuntimeError, AttributeError)):
            getattr(torch.cuda.CUDAGraph, name)(None)
    finally:
        unseen.stop()
    assert announced == [name]
    assert getattr(torch.cuda.CUDAGraph, name) is original


def test_a_function_that_the_script_replaces_meanwhile_stays_its_own() -> None:
    def own(*args: object, **kwargs: object) -> None: ...

    unseen = UnseenFunctions(lambda: None)
    original = torch.cuda.CUDAGraph.replay
    unseen.watch()
    try:
        torch.cuda.CUDAGraph.replay = own  # type: ignore[method-assign]
        unseen.stop()
        assert torch.cuda.CUDAGraph.replay is own
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]
