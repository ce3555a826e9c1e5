"""Ranks meet at rank 0 and agree, or all get one reason why not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from test_export import exported
from torch.distributed import TCPStore

from autotune.errors import AutotuneError, LaunchError
from autotune.export import read_export
from runtime_rewriter.agent_store import AgentStore
from runtime_rewriter.rank.exported import agree_on_plan
from runtime_rewriter.rendezvous import Facts, Peers, launched_processes, meet, refuse_lone_ranks
from runtime_rewriter.world.worker import free_port

ADDRESS = "127.0.0.1"


def on_ranks(ranks: int, work: Callable[[Peers], Facts]) -> list[Facts | str]:
    """What `work` returns on each rank, or the message of its error."""
    port = free_port(0, 0, ADDRESS)

    def rank(number: int) -> Facts | str:
        peers = meet(number, ranks, ADDRESS, port, 60.0)
        try:
            return work(peers)
        except AutotuneError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for line in peers.lines:
                line.close()

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(rank, range(ranks)))


def together(facts: list[Facts]) -> Facts:
    return {"sum": sum(each["value"] for each in facts)}


def test_all_ranks_get_what_rank_0_decides_from_their_facts() -> None:
    results = on_ranks(3, lambda peers: peers.agree({"value": 10 + peers.rank}, together, 60.0))
    assert results == [{"sum": 33}] * 3


def test_a_problem_of_one_rank_is_raised_on_all() -> None:
    def work(peers: Peers) -> Facts:
        facts = {"problem": "no room on rank 2"} if peers.rank == 2 else {"value": 1}
        return peers.agree(facts, together, 60.0)

    assert on_ranks(3, work) == ["LaunchError: no room on rank 2"] * 3


def test_ranks_with_other_exports_all_name_each_ones_plan(tmp_path: Path) -> None:
    chosen, _ = exported()
    kept = replace(chosen, strategy=None, plan_id=None)

    def agreed(*of_ranks: str) -> list[Facts | str]:
        def work(peers: Peers) -> Facts:
            path = tmp_path / of_ranks[peers.rank]
            export = agree_on_plan(peers, lambda: read_export(path), 5.0)
            return {"reason": None if export is None else export.reason}

        return on_ranks(len(of_ranks), work)

    chosen.write(tmp_path / "chosen.json")
    replace(chosen, reason="copied").write(tmp_path / "copied.json")
    kept.write(tmp_path / "kept.json")
    reasons = [{"reason": chosen.reason}, {"reason": "copied"}]
    assert agreed("chosen.json", "copied.json") == reasons
    assert (
        agreed("chosen.json", "chosen.json", "kept.json")
        == [
            "PlanMismatch: every rank must hold the same plan, but "
            f"rank 0 holds {chosen.plan_id}, rank 1 holds {chosen.plan_id}, rank 2 holds no plan; "
            "give all ranks the same export"
        ]
        * 3
    )
    first, second = agreed("chosen.json", "absent.json")
    assert first.startswith("LaunchError: rank 1: ") and second.startswith("InvalidInput: ")
    assert "absent.json" in first and "absent.json" in second


def test_a_rank_that_ends_is_named_on_the_others() -> None:
    def work(peers: Peers) -> Facts:
        return {} if peers.rank == 1 else peers.agree({"value": 1}, together, 60.0)

    first, gone, last = on_ranks(3, work)
    assert gone == {}
    assert "connection closed by peer: rank 1 ended" in first and first == last


def test_rank_0_closes_its_port_once_all_are_there_and_ignores_strangers() -> None:
    port = free_port(0, 0, ADDRESS)
    with ThreadPoolExecutor(2) as pool:
        leading = pool.submit(meet, 0, 2, ADDRESS, port, 60.0)
        stranger = None
        while stranger is None:
            try:
                stranger = socket.create_connection((ADDRESS, port), timeout=5.0)
            except ConnectionRefusedError:
                assert not leading.done()
        stranger.sendall(b'{"rank": 1}\n')
        assert stranger.recv(1) == b""  # it was turned away
        stranger.close()
        pool.submit(meet, 1, 2, ADDRESS, port, 60.0).result(10.0).lines[0].close()
        leading.result(10.0).lines[0].close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((ADDRESS, port), timeout=5.0)


def test_ranks_that_do_not_come_are_named() -> None:
    with pytest.raises(LaunchError, match=r"within 0.2 s, but 1, 2 did not"):
        meet(0, 3, ADDRESS, free_port(0, 0, ADDRESS), 0.2)
    with pytest.raises(LaunchError, match=r"rank 1 cannot reach rank 0 at 127.0.0.1:1"):
        meet(1, 2, ADDRESS, 1, 0.2)


def test_ranks_of_torchrun_meet_at_a_port_that_its_store_tells() -> None:
    agent_store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    environment = {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(agent_store.port),
    }
    agent = AgentStore.of(environment)
    assert agent is not None and AgentStore.of({}) is None
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(meet, rank, 2, ADDRESS, agent.port, 10.0, agent) for rank in range(2)]
        first, second = (rank.result(20.0) for rank in ranks)
    assert len(first.lines) == len(second.lines) == 1
    for line in (*first.lines, *second.lines):
        line.close()


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("mpirun", "OMPI_COMM_WORLD_SIZE"),
        ("horovodrun", "HOROVOD_SIZE"),
        ("srun", "SLURM_STEP_NUM_TASKS"),
        ("a launcher of MPI", "PMI_SIZE"),
    ],
)
def test_ranks_of_a_launcher_that_gives_them_no_place_are_refused(launcher: str, name: str) -> None:
    with pytest.raises(LaunchError, match=rf"but {launcher} started 4 processes \({name}\) .*run"):
        refuse_lone_ranks({name: "4"})
    refuse_lone_ranks({name: "1"})
    refuse_lone_ranks({name: "4", "WORLD_SIZE": "4"})
    refuse_lone_ranks({name: "4", "WORLD_SIZE": "1"})  # a training of its own
    assert launched_processes({"WORLD_SIZE": "2", name: "4"}).startswith("a launcher started 2 ")


def test_a_script_at_the_terminal_of_srun_is_alone_and_other_tasks_are_not() -> None:
    environment = {"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8", "SLURM_PTY_PORT": "40000"}
    assert launched_processes(environment, at_terminal=True) == ""
    assert "8 processes" in launched_processes(environment, at_terminal=False)
