"""Launch commands as people type them: what is started, on how many workers, with which setup."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from runtime_rewriter.world.command import (
    at_any_port,
    launcher_threads,
    read_command,
    with_launcher,
)
from runtime_rewriter.world.launchers import _read_any_torchrun, _read_plain_torchrun
from runtime_rewriter.world.script_command import ScriptCommand
from runtime_rewriter.world.starting import launcher_words


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # no configuration of accelerate's own


COMMANDS = {
    "train.py --lr 1": ("train.py", False, None),
    "python train.py --lr 1": ("train.py", False, None),
    "python -u -m pkg.train --lr 1": ("pkg.train", True, None),
    "torchrun --nproc-per-node 4 train.py --lr 1": ("train.py", False, 4),
    "torchrun --nnodes 2 --nproc-per-node=2 -m pkg.train --lr 1": ("pkg.train", True, 4),
    "python -m torch.distributed.run --nproc-per-node 2 train.py --lr 1": ("train.py", False, 2),
    "python -m torch.distributed.launch --nproc-per-node 2 --use-env train.py --lr 1": (
        "train.py",
        False,
        2,
    ),
    "python -m torch.distributed.launch --use_env -m pkg.train --lr 1": ("pkg.train", True, 1),
    "env A=1 B=x=y torchrun --nproc-per-node 2 train.py --lr 1": ("train.py", False, 2),
    "uv run train.py --lr 1": ("train.py", False, None),
    "uv run --frozen torchrun --nproc-per-node 2 train.py --lr 1": ("train.py", False, 2),
    "uv run -m pkg.train --lr 1": ("pkg.train", True, None),
    "uv run env A=1 python train.py --lr 1": ("train.py", False, None),
    "mpirun -np 4 --oversubscribe python train.py --lr 1": ("train.py", False, 4),
    "mpirun -n 2 -H a:1,b:1 -x A=1 python -m pkg.train --lr 1": ("pkg.train", True, 2),
    "mpirun --np 2 -mca pml ob1 -bind-to none --timeout 9 train.py --lr 1": ("train.py", False, 2),
    "horovodrun -np 2 python train.py --lr 1": ("train.py", False, 2),
    "horovodrun -np 4 -H a:2,b:2 --cycle-time-ms 2 python -m pkg.train --lr 1": (
        "pkg.train",
        True,
        4,
    ),
    "accelerate launch --multi_gpu --num_processes 2 train.py --lr 1": ("train.py", False, 2),
    "accelerate launch --num_processes 1 -m pkg.train --lr 1": ("pkg.train", True, None),
    "accelerate-launch --multi_gpu --num_processes 2 train.py --lr 1": ("train.py", False, 2),
    "python -m accelerate.commands.launch --multi_gpu --num_processes 2 train.py --lr 1": (
        "train.py",
        False,
        2,
    ),
}


def read(command: str) -> ScriptCommand:
    if "accelerate" in command:
        pytest.importorskip("accelerate")
    if "horovodrun" in command:
        pytest.importorskip("horovod")
    return read_command(command.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_launcher_is_read_as_its_user_means_it(command: str) -> None:
    target, is_module, workers = COMMANDS[command]
    script = read(command)
    assert (script.target, script.is_module, script.workers) == (target, is_module, workers)
    assert script.arguments == ("--lr", "1")


@pytest.mark.parametrize(
    "words",
    [
        "train.py --nproc-per-node 3",
        "--nproc-per-node 4 train.py --lr 1",
        "--nproc_per_node=2 --nnodes 3 --standalone train.py -m x",
        "--standalone --nnodes=1 --nproc-per-node 8 -m pkg.train --lr 1",
        "--module pkg.train",
    ],
)
def test_plain_options_of_torchrun_mean_what_its_own_parser_reads(words: str) -> None:
    plain = _read_plain_torchrun(words.split())
    assert plain == _read_any_torchrun(words.split())


@pytest.mark.parametrize(
    "words", ["--nproc-per-node gpu a.py", "--nnodes 1:4 a.py", "--max-restarts 1 a.py", "-- a.py"]
)
def test_other_options_of_torchrun_are_left_to_its_own_parser(words: str) -> None:
    assert _read_plain_torchrun(words.split()) is None


def test_variables_of_the_command_reach_the_ranks() -> None:
    nested = read("env A=1 B=2 uv run env B=3 C=x=y torchrun --nproc-per-node 2 train.py")
    assert nested.environment == {"A": "1", "B": "3", "C": "x=y"}
    assert read("mpirun -np 2 -x A=1 python train.py").environment == {"A": "1"}
    options = "--fusion-threshold-mb 32 --cycle-time-ms 2.5 --timeline-filename t.json"
    assert read(f"horovodrun -np 2 {options} python train.py").environment == {
        "HOROVOD_FUSION_THRESHOLD": str(32 * 2**20),
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_TIMELINE": "t.json",
    }
    accelerated = read(
        "accelerate launch --multi_gpu --num_processes 2 --mixed_precision bf16 train.py"
    )
    assert accelerated.environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert not {"MASTER_ADDR", "MASTER_PORT"} & set(accelerated.environment)


def test_a_variable_that_mpirun_would_pass_on_stays_unset_if_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An empty CUDA_VISIBLE_DEVICES would hide all GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    words = "mpirun -np 2 -x CUDA_VISIBLE_DEVICES -x NCCL_DEBUG -x LR= python train.py"
    command = read(words)
    assert command.environment == {"NCCL_DEBUG": "INFO", "LR": ""}
    assert command.mpirun_words == tuple(words.split()[:-2])


def test_the_gpus_that_accelerate_is_given_reach_the_ranks() -> None:
    chosen = "accelerate launch --multi_gpu --num_processes 2 --gpu_ids 2,3 train.py"
    assert read(chosen).environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    alone = "accelerate launch --num_processes 1 --gpu_ids 3 train.py"
    assert read(alone).environment["CUDA_VISIBLE_DEVICES"] == "3"


NVIDIA_SMI = """#!/bin/sh
case "$1" in
    *count*) printf '2, NVIDIA GeForce RTX 4090\\n2, NVIDIA GeForce RTX 4090\\n' ;;
    *driver*) printf '%s\\n' {driver} ;;
esac
"""


@pytest.mark.parametrize(("driver", "disabled"), [("535.54.03", True), ("550.90.07", False)])
def test_nccl_leaves_out_what_accelerate_knows_that_the_gpus_lack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, disabled: bool
) -> None:
    """accelerate asks nvidia-smi for the GPUs and their driver."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI.format(driver=driver))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")  # the user's own choice stays
    command = read("accelerate launch --multi_gpu --num_processes 2 train.py")
    nccl = {name: value for name, value in command.environment.items() if "NCCL" in name}
    assert nccl == ({"NCCL_P2P_DISABLE": "1"} if disabled else {})


REFUSED = {
    "": "a command is needed",
    "bash train.sh": "must start with torchrun, accelerate launch, horovodrun, mpirun, python or",
    "deepspeed train.py": "DeepSpeed sends gradients itself",
    "srun python train.py": r"inside the allocation start Ray on every node",
    "uv sync": "uv starts a script with `uv run` only, but the command is `uv sync`",
    "uv run --with x train.py": "uv run OPTIONS autotune tune -- COMMAND",
    "uv run": "uv run OPTIONS autotune tune -- COMMAND",
    "env -i python train.py": "must be followed by NAME=value and a command",
    "env A=1": "must be followed by NAME=value and a command",
    "mpirun python train.py": "needs the number of ranks",
    "mpirun -np x python train.py": "-np needs a number, but has 'x'",
    "mpirun -np 2 --output-proctable x train.py": "option --output-proctable is not supported",
    "mpirun -np 2 --mca pml": "option --mca needs 2 values, but the command ends",
    "mpirun -np 2 torchrun --nproc-per-node 2 train.py": "starts another launcher",
    "horovodrun python train.py": "the following arguments are required: -np",
    "horovodrun -np 2 --nonsense python train.py": "unrecognized arguments|must be a file",
    "horovodrun -np 2 --mpi python train.py": "leave the option out",
    "horovodrun -np 2 --autotune python train.py": "--autotune turns it on; leave that",
    "horovodrun -np 2 torchrun --nproc-per-node 2 train.py": "horovodrun must start the script",
    "horovodrun -np 2 --min-np 1 --host-discovery-script d.sh python train.py": "elastic Horovod",
    "torchrun --nproc-per-node 2 --nonsense 3 train.py": "torchrun does not understand",
    "torchrun --nproc-per-node many train.py": "needs numbers",
    "python -m torch.distributed.launch --nproc-per-node 2 train.py": (
        "passes --local-rank to train.py; use torchrun, and let the script read os.environ"
    ),
    "python -m torch.distributed.launch train.py --use-env": "passes --local-rank to train.py",
    "accelerate launch --num_machines 2 --num_processes 4 train.py": (
        "needs --num_processes of all machines, --main_process_ip and --machine_rank, but has "
        "--num_machines 2 --num_processes 4, the address None and the machine rank None; add"
    ),
    "accelerate launch --use_deepspeed --num_processes 2 train.py": "is set to use_deepspeed",
    "accelerate launch --use_fsdp --num_processes 2 train.py": "is set to use_fsdp",
    "python": "python needs a script or -m module",
    "python -u -O train.py": "has '-O train.py'; set its options .* PYTHONOPTIMIZE=1 python",
    "mpirun -np 2 python train.py : -np 2 python b.py": "one script on all ranks, but after ':'",
    "mpirun -np 2 python -O train.py": "PYTHONOPTIMIZE=1",
    "python other.py": "the training script must be a file",
    f"python {'x' * 5000}.py": "File name too long",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_started_is_refused_with_the_fix(command: str) -> None:
    with pytest.raises(InvalidInput, match=REFUSED[command]):
        read(command)


def test_a_run_keeps_horovodrun_with_its_options() -> None:
    words = ["horovodrun", "-np", "2", "--cycle-time-ms", "2", "python", "train.py", "--lr", "1"]
    run = with_launcher(read(" ".join(words)), 2, ("--strategy", "best.json"))
    assert run[:6] == ["horovodrun", "--gloo", *words[1:5]]
    assert run[6:8] == [sys.executable, "-u"]
    again = with_launcher(read("horovodrun -np 2 --gloo python train.py"), 2, ())
    assert again[:4] == ["horovodrun", "-np", "2", "--gloo"]
    assert run[-6:] == ["--strategy", "best.json", "--", "train.py", "--lr", "1"]


def test_variables_after_mpirun_reach_the_ranks_of_every_host() -> None:
    """Open MPI gives the environment of `mpirun` itself to the ranks of its own host only."""
    command = read("env HERE=1 mpirun -np 4 -H a:2,b:2 -x A=1 uv run env A=2 B=x=y python train.py")
    assert command.environment == {"HERE": "1", "A": "2", "B": "x=y"}
    run = with_launcher(command, 4, ("--strategy", "best.json"))
    launcher = ["mpirun", "-np", "4", "-H", "a:2,b:2", "-x", "A=1"]
    assert run[: len(launcher) + 5] == [*launcher, "env", "A=2", "B=x=y", sys.executable, "-u"]


def test_two_runs_at_once_share_no_port() -> None:
    words = "torchrun --nproc-per-node 2 --master-port 29501 train.py"
    run = with_launcher(at_any_port(read(words)), 2, ())
    assert run[3:6] == ["--standalone", "--nproc-per-node", "2"]
    for other in ("torchrun --standalone --nproc-per-node 2 train.py", "mpirun -np 2 train.py"):
        assert at_any_port(read(other)) == read(other)


def test_a_run_keeps_the_launcher_of_its_command() -> None:
    mode = ("--strategy", "best.json")
    torchrun = with_launcher(read("torchrun --nproc-per-node 4 train.py --lr 1"), 2, mode)
    assert torchrun[:5] == [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    assert torchrun[-6:] == ["--strategy", "best.json", "--", "train.py", "--lr", "1"]
    mpirun = with_launcher(read("mpirun -np 2 --oversubscribe python train.py"), 2, mode)
    assert mpirun[:6] == ["mpirun", "-np", "2", "--oversubscribe", sys.executable, "-u"]
    bare = with_launcher(read("train.py"), 3, mode)
    assert bare[3:6] == ["--standalone", "--nproc-per-node", "3"]
    accelerated = "accelerate launch --multi_gpu --num_processes 2 train.py"
    assert with_launcher(read(accelerated), 3, mode)[5] == "2"


MACHINES = "--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1"


def test_a_run_of_accelerate_is_one_world_of_all_its_machines() -> None:
    command = read(f"accelerate launch {MACHINES} --num_processes 8 train.py --lr 1")
    assert (command.workers, command.nodes, command.rendezvous) == (8, 2, "10.0.0.1")
    run = with_launcher(command, 8, ("--strategy", "best.json"))
    options = run[3 : run.index(launcher_words()[0])]
    again = read_command(["torchrun", *options, "train.py"])
    assert (again.workers, again.nodes) == (8, 2)
    values = dict(zip(options[::2], options[1::2], strict=True))
    assert (values["--node-rank"], values["--rdzv-endpoint"]) == ("1", "10.0.0.1:29500")
    port = read(f"accelerate launch {MACHINES} --main_process_port 7 --num_processes 5 train.py")
    assert port.torchrun_options[-1] == "10.0.0.1:7" and port.workers == 4


@pytest.mark.parametrize(
    ("options", "rendezvous"),
    [
        ("--nnodes 2", ""),
        ("--nnodes 2 --node-rank 1 --master-port 29501", ""),
        ("--nnodes 2 --master-addr 127.0.0.1", ""),
        ("--nnodes 2 --master_addr 10.0.0.1", "10.0.0.1"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1", "a:1"),
    ],
)
def test_the_place_where_the_nodes_of_torchrun_meet_is_read(options: str, rendezvous: str) -> None:
    command = read(f"torchrun {options} --nproc-per-node 2 train.py")
    assert (command.nodes, command.workers, command.rendezvous) == (2, 4, rendezvous)


@pytest.mark.parametrize(
    ("command", "on_host", "threads"),
    [
        ("torchrun --nproc-per-node 2 train.py", 2, "1"),
        ("torchrun --nproc-per-node 1 --nnodes 4 train.py", 1, None),
        ("python train.py", 4, "1"),
        ("python train.py", 1, None),
        ("mpirun -np 4 python train.py", 4, None),
        ("horovodrun -np 2 python train.py", 2, None),
    ],
)
def test_ranks_get_the_threads_of_the_launcher_of_a_run(
    command: str, on_host: int, threads: str | None
) -> None:
    assert launcher_threads(read(command), on_host).get("OMP_NUM_THREADS") == threads


def test_a_command_may_name_the_python_of_autotune() -> None:
    folder = Path(sys.executable).parent
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    Path("torchrun").write_text(f"#!{sys.executable}\nfrom torch.distributed.run import main\n")
    for launcher in (f"{folder}/python", f"python{version}", "python3", "./torchrun"):
        assert read(f"{launcher} train.py").target == "train.py"


@pytest.mark.parametrize("launcher", ["envs/b/bin/python", "envs/b/bin/torchrun", "python2.7"])
def test_a_python_of_another_environment_is_refused(launcher: str) -> None:
    with pytest.raises(InvalidInput, match=f"runs under autotune's own Python, .*{launcher}"):
        read(f"{launcher} train.py")
    with pytest.raises(InvalidInput, match="install autotune"):
        read(f"env A=1 {launcher} train.py")


def test_the_first_line_of_a_launcher_names_its_python() -> None:
    Path("torchrun").write_text("#!/opt/conda/bin/python\n")
    with pytest.raises(InvalidInput, match=r"names \./torchrun; .* write torchrun without its"):
        read("./torchrun --nproc-per-node 2 train.py")
