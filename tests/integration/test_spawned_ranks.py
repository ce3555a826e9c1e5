"""Ranks that a script spawns see what they see without us, also behind torchrun's agent."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch_world import exempt_imports, fork_server

from runtime_rewriter.ports import unclaimed_port
from runtime_rewriter.rank.own_ranks import spawned_ranks_controlled

SCRIPT = str(Path(__file__).parents[1] / "scripts" / "spawned_state.py")
TIMEOUT_S = 120.0


@pytest.mark.job
def test_a_spawned_rank_sees_the_state_of_a_new_process(tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("plain", "ours")}
    for folder in folders.values():
        folder.mkdir()
    port = str(unclaimed_port("127.0.0.1"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, SCRIPT, str(folders["plain"]), port]
    subprocess.run(words, env=environment, check=True, timeout=TIMEOUT_S)
    start_ranks([SCRIPT, str(folders["ours"]), port])
    plain, ours = map(written, folders.values())
    assert [rank["state"] for rank in ours["rank"]] == [rank["state"] for rank in plain["rank"]]
    assert all(rank["same token"] for rank in (*plain["rank"], *ours["rank"]))
    assert ours["rank"][0]["token"] == ours["rank"][1]["token"]
    drawn = [value for rank in (*plain["rank"], *ours["rank"]) for value in rank["drawn"]]
    assert len(set(drawn)) == 12
    assert ours["main"] == plain["main"]


def written(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [json.loads(path.read_text()) for path in sorted(folder.glob(f"{name}*.json"))]
        for name in ("rank", "main")
    }


def start_ranks(words: list[str]) -> None:
    """Run the script as two ranks of one agent of torchrun."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [
        fork_server().Process(
            target=run_rank, args=(words, environment | {"LOCAL_RANK": rank}), daemon=True
        )
        for rank in "01"
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_S)
        if rank.is_alive():
            rank.kill()
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def run_rank(words: list[str], environment: dict[str, str]) -> None:
    exempt_imports()
    multiprocessing.set_start_method("fork", force=True)  # as where nobody has chosen one
    os.environ.update(environment)
    sys.argv = words
    with spawned_ranks_controlled():
        runpy.run_path(words[0], run_name="__main__")
