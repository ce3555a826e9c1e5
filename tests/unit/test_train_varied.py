"""A training script with other options of its DDP, a hook, or little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from autotune.jobs.campaign.setups import TRAIN_VARIED

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DDP(torch.nn.Linear(4, 4), bucket_cap_mb=1, static_graph=False)
print(sys.argv[1:], model.static_graph, model.bucket_bytes_cap, len(model._comm_hooks))
for _ in range(12):
    model(torch.ones(2, 4)).sum().backward()
kept = []
try:
    while len(kept) < 400:
        kept.append(torch.zeros(2**18))
except RuntimeError:
    print("no memory")
print(len(kept))
dist.destroy_process_group()
"""


def test_the_script_runs_with_its_words_and_the_given_options(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    variation = {"ddp": {"static_graph": True}, "hook": "fp16", "spare_memory_mib": 200}
    words = [sys.executable, str(TRAIN_VARIED), json.dumps(variation), str(script), "--epochs", "3"]
    run = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    first, failed, kept = run.stdout.splitlines()
    assert first == f"['--epochs', '3'] True {2**20} 1"
    assert failed == "no memory" and 50 < int(kept) <= 200
