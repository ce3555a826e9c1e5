"""Run a training script with other options of its DDP: `python train_varied.py JSON SCRIPT ...`.

The JSON object has three keys:

- `ddp`: arguments of `DistributedDataParallel`, which replace the script's own;
- `hook`: a communication hook of torch, a key of `HOOKS`, or "";
- `spare_memory_mib`: a limit of what the process may allocate beyond what it has in forward pass
  `LIMITED_FROM`, when profile and probe are over; null: no limit.

The script itself is unmodified.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import json
import resource
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.nn.parallel as parallel
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

MIB = 2**20
LIMITED_FROM = 12
FIRST_COMPRESSED_STEP = 2
"""PowerSGD's hook may start after DDP has rebuilt its buckets, in its second step."""


def _power_sgd(rank: int) -> Callable[[Any], None]:
    def register(ddp: Any) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=FIRST_COMPRESSED_STEP
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return register


HOOKS: Mapping[str, Callable[[Any], None]] = MappingProxyType(
    {
        "fp16": lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "power_sgd_4": _power_sgd(4),
    }
)
"""Hooks whose training ends near the uncompressed loss in
`tests/integration/test_compressed_training.py`."""


def main() -> None:
    words, script, *arguments = sys.argv[1:]
    variation = json.loads(words)
    own: Any = parallel.DistributedDataParallel

    class VariedDataParallel(own):  # type: ignore[misc]
        """The script's DDP with the given options."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, **variation["ddp"]})
            if variation["hook"]:
                HOOKS[variation["hook"]](self)
            self.passes = 0

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            self.passes += 1
            if self.passes == LIMITED_FROM and variation["spare_memory_mib"] is not None:
                limit_memory(variation["spare_memory_mib"] * MIB)
            return super().forward(*inputs, **kwargs)

    parallel.DistributedDataParallel = VariedDataParallel  # type: ignore[misc]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def limit_memory(spare_bytes: int) -> None:
    """Let the process allocate at most `spare_bytes` of private memory from now on."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    limit = int(fields["VmData"].split()[0]) * 1024 + spare_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


if __name__ == "__main__":
    main()
