"""A rank of Horovod that logs its calls: `horovod_script.py FOLDER`; rank 0 writes a timeline."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import horovod.torch as hvd
import torch

from runtime_rewriter.horovod.recording import HorovodLog

STEPS = 3
WIDTH = 64


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    original = hvd.allreduce_async_
    log = HorovodLog()
    with log.watching():
        for step in range(STEPS):
            log.step = step
            optimizer.zero_grad()
            model(torch.ones(4, WIDTH)).sum().backward()
            optimizer.step()
        log.step = -1
        one, two = torch.ones(8), torch.ones(2, dtype=torch.float64)
        handle = hvd.grouped_allreduce_async([one, torch.ones(4)], name="group")
        while not hvd.poll(handle):
            pass
        summed = hvd.synchronize(handle)
        hvd.broadcast_(two, root_rank=0, name="two")
    hvd.allreduce_(torch.ones(1), name="unseen")
    result = {
        "calls": [asdict(call) for call in log.calls],
        "restored": hvd.allreduce_async_ is original,
        "sum": [float(tensor.sum()) for tensor in summed],
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(result))
    hvd.stop_timeline()  # it writes what is left, which a shutdown would drop
    hvd.shutdown()


if __name__ == "__main__":
    main()
