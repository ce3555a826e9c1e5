"""The runtime on CUDA tensors, two and four ranks on one GPU: every strategy trains as torch's DDP
does, over Gloo and over NCCL."""

from __future__ import annotations

import pytest
import torch
from strategy_rank import CASES, RankOutcome, check_case, enacted_alike
from torch_world import run_world

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OVER_NCCL = {
    ranks: tuple(case for case in cases if not case.endswith("/sparse"))
    for ranks, cases in CASES.items()
}
"""By ranks. torch's DDP does not send sparse gradients over NCCL, so there is nothing to compare
with."""


def check_cases_of(rank: int, cases: tuple[str, ...]) -> dict[str, list[RankOutcome]]:
    return {case: check_case(rank, case) for case in cases}


WORLDS = [
    *(("nccl", "cuda", 2, case) for case in OVER_NCCL[2]),
    ("nccl", "cuda:0", 2, OVER_NCCL[2][0]),
    *(("nccl", "cuda:0", 4, case) for case in OVER_NCCL[4]),  # groups of some of the ranks, too
    *(("gloo", "cuda", 2, case) for case in CASES[2]),
]
LEAST_ENACTED = {2: 30, 4: 20}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "device", "ranks", "case"), WORLDS)
def test_every_strategy_trains_as_ddp_on_a_gpu(
    backend: str, device: str, ranks: int, case: str
) -> None:
    by_rank = run_world(
        check_cases_of, ranks, (case,), timeout_s=240.0, backend=backend, device=device
    )
    assert len(enacted_alike(by_rank)) >= LEAST_ENACTED[ranks]
