"""An export of several hosts is used by one launcher per host, in the job's order of hosts."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from bare_export import bare_export
from synthetic_job import WORKLOAD, strategy

from autotune.cli import main
from autotune.cluster import Cluster, Host
from autotune.errors import InvalidInput
from autotune.export import Export
from autotune.jobs.several_hosts import (
    has_ranks_of,
    hosts_text,
    on_several_hosts,
    ranks_fix,
    refuse_other_hosts,
    refuse_repeated_start,
    use_of,
)
from autotune.records import REAL_CONDITIONS, Conditions, Network
from runtime_rewriter.world.command import read_command

BEST = Path("best.json")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no configuration of accelerate's own


def hosts_with(*devices: int) -> Cluster:
    hosts = (
        Host(f"node-{number}", ranks, 1e9, 1e-5, 1e10, 1e-6, address=f"10.0.0.{number}")
        for number, ranks in enumerate(devices)
    )
    return Cluster("hosts", tuple(hosts))


ALLOCATION = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node-[0-1]"}
EVEN, UNEVEN = hosts_with(4, 4), hosts_with(3, 1)
MEETING = "--node-rank R --master-addr 10.0.0.0 --master-port 29500"
ELASTIC = "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint a:1 train.py"


def export_on(cluster: Cluster, network: Network = Network.HOSTS) -> Export:
    size = cluster.world_size
    bare = bare_export(WORKLOAD, strategy(0), size, plan_id=None, conditions=Conditions(network))
    return replace(bare, cluster=cluster)


def run_of(words: str, cluster: Cluster) -> str:
    """The launch command that is printed for a job with the command `words`."""
    return use_of(BEST, words.split(), cluster).command.removeprefix(
        "autotune run --strategy best.json -- "
    )


def test_the_hosts_are_listed_in_the_order_of_their_ranks() -> None:
    assert hosts_text(UNEVEN) == "0 node-0 at 10.0.0.0 (3 ranks), 1 node-1 at 10.0.0.1 (1 rank)"
    assert hosts_text(hosts_with(*(1,) * 20)).endswith("(1 rank) and 4 more (see best.json)")


def test_only_several_real_hosts_need_a_launcher_each() -> None:
    assert on_several_hosts(REAL_CONDITIONS, EVEN)
    assert not on_several_hosts(REAL_CONDITIONS, Cluster.local(8))
    assert not on_several_hosts(Conditions(Network.EMULATED), EVEN)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "python train.py --lr 1",
            f"torchrun --nnodes 2 --nproc-per-node 4 {MEETING} train.py --lr 1",
        ),
        (
            "torchrun --nnodes=2 --nproc_per_node 4 --max-restarts 1 -m pkg.train",
            f"torchrun --nnodes 2 --nproc-per-node 4 {MEETING} --max-restarts 1 -m pkg.train",
        ),
        (
            "env A=1 torchrun --standalone --nproc-per-node 8 train.py",
            f"env A=1 torchrun --nnodes 2 --nproc-per-node 4 {MEETING} train.py",
        ),
        (ELASTIC, ELASTIC),
        (
            "mpirun -np 8 -x A=1 python train.py",
            "mpirun -H 10.0.0.0:4,10.0.0.1:4 -np 8 -x A=1 python train.py",
        ),
        ("mpirun -np 8 -H a:4,b:4 python train.py", "mpirun -np 8 -H a:4,b:4 python train.py"),
        ("python gone.py", "python gone.py"),
    ],
)
def test_the_printed_command_joins_the_hosts(words: str, expected: str) -> None:
    assert run_of(words, EVEN) == expected


def test_uneven_hosts_pass_their_own_numbers_of_ranks() -> None:
    use = use_of(BEST, ["python", "train.py"], UNEVEN)
    assert use.where == "on every host, with R = its number and D = its ranks"
    assert f"torchrun --nnodes 2 --nproc-per-node D {MEETING} train.py" in use.command


def test_accelerate_gets_its_own_options_of_machines() -> None:
    pytest.importorskip("accelerate")
    words = "accelerate launch --multi_gpu --num_processes 8 train.py --lr 1"
    printed = run_of(words, EVEN)
    command = read_command(shlex.split(printed.replace(" R ", " 1 ")))
    assert (command.workers, command.nodes, command.arguments) == (8, 2, ("--lr", "1"))
    assert command.rendezvous == "10.0.0.0"
    assert run_of(printed, EVEN) == printed


@pytest.mark.parametrize("cluster", [EVEN, UNEVEN])
def test_every_host_may_run_the_printed_command(cluster: Cluster) -> None:
    export = export_on(cluster)
    for number, host in enumerate(cluster.hosts):
        printed = run_of("python train.py", cluster)
        printed = printed.replace(" R ", f" {number} ").replace(" D ", f" {host.devices} ")
        command = read_command(printed.split())
        assert has_ranks_of(export, command)
        refuse_other_hosts(export, command, printed.split(), BEST, {})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("python train.py", "starts all ranks on this machine"),
        ("torchrun --nproc-per-node 8 train.py", "starts all ranks on this machine"),
        ("torchrun --nnodes 2 --nproc-per-node 4 train.py", "does not state where its 2 machines"),
    ],
)
def test_a_command_that_joins_no_hosts_is_refused_with_one_that_does(
    words: str, problem: str
) -> None:
    command = read_command(words.split())
    with pytest.raises(InvalidInput) as refused:
        refuse_other_hosts(export_on(EVEN), command, words.split(), BEST, ALLOCATION)
    message = str(refused.value)
    assert f"tuned on 2 hosts, which a launcher must join, but the command {problem}" in message
    assert f"torchrun --nnodes 2 --nproc-per-node 4 {MEETING} train.py" in message
    assert hosts_text(EVEN) in message
    refuse_other_hosts(export_on(EVEN, Network.EMULATED), command, words.split(), BEST, {})


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (ELASTIC, {}),
        ("mpirun -np 8 -H a:4,b:4 python train.py", {}),
        ("mpirun -np 8 --hostfile hosts python train.py", {}),
        ("mpirun -np 8 -machinefile hosts python train.py", {}),
        ("mpirun -np 8 --mca orte_default_hostfile hosts python train.py", {}),
        ("env PRTE_MCA_prte_default_hostfile=hosts mpirun -np 8 python train.py", {}),
        ("mpirun -np 8 python train.py", {"OMPI_MCA_orte_default_hostfile": "hosts"}),
        ("mpirun -np 8 python train.py", {"PBS_NODEFILE": "/var/hosts"}),
        ("mpirun -np 8 python train.py", ALLOCATION),
        ("horovodrun -np 8 -H a:4,b:4 python train.py", {}),
        ("horovodrun -np 8 --hostfile hosts python train.py", {}),
        ("horovodrun -np 8 python train.py", {"LSB_JOBID": "1"}),
    ],
)
def test_launchers_of_several_hosts_are_left_to_their_user(
    words: str, environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    if words.startswith("horovodrun"):
        pytest.importorskip("horovod")
    command = read_command(words.split())
    refuse_other_hosts(export_on(EVEN), command, words.split(), BEST, environment)
    assert not caplog.messages


def test_mpirun_without_hosts_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Its configuration files may name them."""
    words = ["mpirun", "-np", "8", "python", "train.py"]
    refuse_other_hosts(export_on(EVEN), read_command(words), words, BEST, {})
    (warning,) = caplog.messages
    problem = "starts all ranks on this machine, unless a configuration file of mpirun names hosts"
    assert f"tuned on 2 hosts, which a launcher must join, but the command {problem}" in warning
    assert "mpirun -H 10.0.0.0:4,10.0.0.1:4 -np 8 python train.py" in warning
    assert hosts_text(EVEN) in warning


def test_horovodrun_without_hosts_is_refused() -> None:
    """It does not read the allocations of Slurm."""
    pytest.importorskip("horovod")
    words = ["horovodrun", "-np", "8", "python", "train.py"]
    expected = r"starts all ranks on this machine; .* horovodrun -H 10\.0\.0\.0:4,10\.0\.0\.1:4 -np"
    with pytest.raises(InvalidInput, match=expected):
        refuse_other_hosts(export_on(EVEN), read_command(words), words, BEST, ALLOCATION)


def test_another_number_of_ranks_is_none_of_the_export() -> None:
    joined = f"torchrun --nnodes 2 --nproc-per-node 4 {MEETING.replace('R', '0')} train.py"
    assert not has_ranks_of(export_on(UNEVEN), read_command(joined.split()))
    assert ranks_fix(export_on(UNEVEN)).endswith(hosts_text(UNEVEN))
    assert ranks_fix(export_on(Cluster.local(2))) == "use --nproc-per-node 2"


def test_a_run_on_one_of_several_hosts_starts_nothing(capsys) -> None:
    export_on(EVEN).write(BEST)
    assert main(["run", "--strategy", "best.json", "--", "python", "train.py"]) == 2
    assert "was tuned on 2 hosts, which a launcher must join" in capsys.readouterr().err


def test_an_export_of_one_host_is_not_enacted_on_several() -> None:
    words = ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", "--master-addr", "a", "train.py"]
    for network in (Network.HOSTS, Network.LOOPBACK):
        one = export_on(hosts_with(8), network)
        with pytest.raises(InvalidInput, match=r"one host .* joins 2; tune on as many, with --nn"):
            refuse_other_hosts(one, read_command(words), words, BEST, {})
        bare = ["python", "train.py"]
        refuse_other_hosts(one, read_command(bare), bare, BEST, {})


def test_a_run_that_srun_starts_once_per_task_starts_nothing(capsys, monkeypatch) -> None:
    """Each task would start all ranks. Several nodes of torchrun state what each of them starts."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    export_on(Cluster.local(4)).write(BEST)
    assert main(["run", "--strategy", "best.json", "--", "python", "train.py"]) == 2
    expected = "starts all ranks of train.py, but srun started 4 processes (SLURM_STEP_NUM_TASKS)"
    assert expected in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="srun started 4 processes"):
        standalone = ["torchrun", "--nproc-per-node", "4", "train.py"]
        refuse_repeated_start(read_command(standalone), {"SLURM_STEP_NUM_TASKS": "4"})
    for words in ("torchrun --nnodes 4 train.py", "mpirun -np 4 python train.py"):
        refuse_repeated_start(read_command(words.split()), {"SLURM_STEP_NUM_TASKS": "4"})
    refuse_repeated_start(read_command(["train.py"]), {"SLURM_STEP_NUM_TASKS": "1"})
