"""The world on real Ray actors: ranks fail and come back, and impossible placements are refused."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from short_jobs import START_S, small_model

from autotune.errors import LaunchError
from autotune.records import (
    Accelerators,
    Conditions,
    Failed,
    FailureKind,
    Measured,
    Network,
    Role,
    TrialRequest,
)
from autotune.strategy_space.builders.collectives import ddp_default
from autotune.strategy_space.plan import plan
from autotune.tuning import statistics
from runtime_rewriter.world.command import read_command
from runtime_rewriter.world.ray_cluster import RayCluster
from runtime_rewriter.world.ray_connection import RayPlace
from runtime_rewriter.world.ray_folder import FOLDER_VARIABLE, processes_of
from runtime_rewriter.world.ray_world import ray_world
from runtime_rewriter.world.views import Protected
from runtime_rewriter.world.world import World

pytestmark = pytest.mark.job
SCRIPT = Path(__file__).parents[1] / "scripts" / "train_small.py"
FROZEN_RAY = Path(__file__).with_name("frozen_ray.py")
RANKS = 2
PROFILE = small_model(emulated=True)
REQUEST = TrialRequest(0, "strategy-under-test", Role.CANDIDATE, warmup_steps=1, timed_steps=3)


@dataclass(frozen=True)
class Clusters:
    """Two private clusters, started one after the other; the second has room for two ranks."""

    connected: RayCluster
    tokens: tuple[str, str]
    handlers: tuple[object, object]
    """Handlers of SIGTERM before the first and after the second."""


@pytest.fixture(scope="module")
def clusters() -> Iterator[Clusters]:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as settings:
        settings.setenv("RAY_prestart_worker_first_driver", "0")  # no rank will use its worker
        first = RayCluster(RayPlace(), 1)
    token = os.environ["RAY_AUTH_TOKEN"]
    first.close()
    connected = RayCluster(RayPlace(), RANKS)
    tokens = (token, os.environ["RAY_AUTH_TOKEN"])
    handlers = (before, signal.getsignal(signal.SIGTERM))
    yield Clusters(connected, tokens, handlers)
    connected.close()


@pytest.mark.parametrize(
    ("server", "outcome"),
    [
        ("gcs_server", "Ray no longer answers; start the command again"),
        pytest.param("raylet", "measured", marks=pytest.mark.slow),
    ],
)
def test_a_frozen_server_of_ray_leaves_nothing_behind_and_lets_the_process_end(
    server, outcome, tmp_path
) -> None:
    program = [sys.executable, FROZEN_RAY, server]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=START_S)
    assert result.returncode == 0, result.stderr
    (folder, mode), printed = (json.loads(line) for line in result.stdout.splitlines())
    assert printed == outcome
    assert mode == 0o700, "the cluster's files are closed to others"
    assert not list(processes_of(Path(folder))) and not Path(folder).exists()


def test_a_raylet_that_ends_at_its_start_is_reported_at_once(tmp_path) -> None:
    program = [sys.executable, str(FROZEN_RAY), "dead raylet"]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=START_S)
    assert "could not be started: the raylet ended with status 1;" in json.loads(result.stdout)


def test_successive_private_clusters_have_other_tokens_and_keep_the_sigterm_handler(
    clusters,
) -> None:
    assert clusters.tokens[0] != clusters.tokens[1]
    assert clusters.handlers[0] is clusters.handlers[1]


def test_a_private_cluster_runs_no_server_without_a_reader(clusters) -> None:
    folder = Path(os.environ[FOLDER_VARIABLE])
    commands = contents(folder, "cmdline")
    assert any(b"gcs_server" in words for words in commands)
    for unread in (b"monitor.py", b"dashboard.py"):
        assert not [words for words in commands if unread in words]


@pytest.fixture
def make_world(clusters: Clusters, tmp_path: Path) -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*words: str, ranks: int = RANKS, **options: Any) -> World:
        command = read_command(["torchrun", "--nproc-per-node", str(ranks), str(SCRIPT), *words])
        place = (clusters.connected, command, ranks, tmp_path / "logs")
        worlds.append(ray_world(*place, 60.0, START_S, statistics, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def fault_words(kind: str, tmp_path: Path) -> list[str]:
    planted = tmp_path / f"{kind}-was-planted"
    return ["--fault", kind, "--fault-step", "9", "--fault-file", str(planted)]


@pytest.mark.slow
def test_ranks_keep_their_conditions_and_environment_after_a_crash(
    make_world, tmp_path, monkeypatch
) -> None:
    conditions = Conditions(Network.LOOPBACK, Accelerators.EMULATED, round_robin=True)
    monkeypatch.setenv("OF_THE_USER", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    world = make_world(*fault_words("crash", tmp_path), conditions=conditions)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")  # as the tracker does
    wanted = plan(ddp_default(PROFILE), PROFILE, RANKS)
    world.emulate(PROFILE)
    crashed = world.run_trial(replace(REQUEST, timed_steps=12), wanted)
    assert isinstance(crashed, Failed) and crashed.kind is FailureKind.CRASH
    assert "planted crash" in crashed.message
    again = world.run_trial(REQUEST, wanted)
    assert isinstance(again, Measured) and min(min(row) for row in again.step_s) >= 0.199
    assert again.gradient_error == 0.0
    assert world.restarts == 1 and world.round_robin() == permitted()
    everywhere = environments()
    ranks = of_ranks(everywhere)
    assert {"1"} == {one["OF_THE_USER"] for one in ranks}
    assert {"1"} == {one["OMP_NUM_THREADS"] for one in ranks}, "torchrun's own default"
    assert not any("MLFLOW_HTTP_REQUEST_TIMEOUT" in one for one in everywhere)


def environments() -> list[dict[str, str]]:
    """The variables of the cluster's processes and of the ranks'."""
    texts = [
        text.decode(errors="replace")
        for text in contents(Path(os.environ[FOLDER_VARIABLE]), "environ")
    ]
    return [dict(one.partition("=")[::2] for one in text.split("\0")) for text in texts]


def contents(folder: Path, name: str) -> list[bytes]:
    """This file of /proc of the processes of Ray's folder that are still there."""
    texts = []
    for process in processes_of(folder):
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{process}/{name}").read_bytes())
    return texts


def of_ranks(everywhere: list[dict[str, str]]) -> list[dict[str, str]]:
    ranks = [one for one in everywhere if one.get("WORLD_SIZE") == str(RANKS)]
    assert len(ranks) >= RANKS
    return ranks


def test_every_start_of_the_script_has_a_fresh_view_and_the_users_files_stay(
    clusters, tmp_path, monkeypatch
) -> None:
    project, starts = tmp_path / "project", tmp_path / "starts"
    project.mkdir()
    script = shutil.copy(SCRIPT.with_name("train_checkpoints.py"), project)
    kept = {"best.pt": b"weights of weeks", "step-0.pt": b"old", "step-7.pt": b"older"}
    for name, content in kept.items():
        (project / name).write_bytes(content)
    monkeypatch.chdir(project)
    words = ["--starts", str(starts), "--crash-step", "8", "--rotate"]
    command = read_command(["mpirun", "-np", str(RANKS), "python", script, *words])
    place = (clusters.connected, command, RANKS, tmp_path / "logs")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    world = ray_world(*place, 60.0, START_S, statistics, protected=Protected.of([project]))
    try:
        crashed = world.run_trial(replace(REQUEST, timed_steps=12), None)
        assert isinstance(crashed, Failed) and "planted crash" in crashed.message
        again = world.run_trial(replace(REQUEST, timed_steps=12), None)
        assert isinstance(again, Measured), again
        assert not any("OMP_NUM_THREADS" in one for one in of_ranks(environments())), "mpirun"
        seen_by = processes_with_a_view_of(project)
    finally:
        world.close()
    assert {path.name: path.read_bytes() for path in project.iterdir()} == kept | {
        "train_checkpoints.py": Path(script).read_bytes()
    }
    rows = [line.split(" ", 2) for line in starts.read_text().splitlines()]
    assert sorted(rank for rank, _, _ in rows) == ["0", "0", "1", "1"]
    assert {best for _, _, best in rows} == {repr(kept["best.pt"])}
    first, second = ({int(namespace) for _, namespace, _ in rows[at : at + 2]} for at in (0, 2))
    assert len(first) == len(second) == 1, "the ranks of a start share one view"
    assert seen_by and not processes_with_a_view_of(project), "the views end with the world"


def processes_with_a_view_of(folder: Path) -> list[str]:
    """The processes that see something else at this folder."""
    numbers = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f" {folder} " in (process / "mountinfo").read_text():
                numbers.append(process.name)
    return numbers


def permitted() -> bool:
    """Whether a process here may take round-robin scheduling."""
    child = os.fork()
    if child == 0:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
def test_the_room_of_lost_workers_is_used_again(make_world, tmp_path) -> None:
    reason = r"all 2 workers must come up within 0\.001 s, but did not"
    with pytest.raises(LaunchError, match=reason):
        make_world(first_call_timeout_s=0.001).run_trial(REQUEST, None)
    with pytest.raises(LaunchError, match=reason):  # before there is a view to end
        protected = Protected.of([tmp_path])
        make_world(first_call_timeout_s=0.001, protected=protected).run_trial(REQUEST, None)
    world = make_world(*fault_words("supervisor", tmp_path))
    assert isinstance(world.run_trial(replace(REQUEST, timed_steps=30), None), Measured)
    assert world.restarts == 1, "the trial that lost a worker was repeated on other workers"
    assert not world.round_robin()
    world.close()
    lost = make_world("--fault", "supervisor", "--fault-step", "3").run_trial(REQUEST, None)
    assert isinstance(lost, Failed)
    again = "a worker was lost, and again on other workers: rank 1 on "
    assert lost.message.startswith(f"{again}{socket.gethostname()} at 127.0.0.1: The actor died")


class _Interrupted(Exception):
    pass


@pytest.mark.slow
def test_closing_does_not_wait_for_a_running_trial(make_world) -> None:
    def interrupt(*_: object) -> None:
        raise _Interrupted

    world = make_world()
    assert isinstance(world.run_trial(REQUEST, None), Measured)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.alarm(2)
        with pytest.raises(_Interrupted):
            world.run_trial(replace(REQUEST, timed_steps=10**9), None)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    world.close()


def test_a_port_range_without_a_free_port_is_refused_with_the_fix(make_world) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        reason = rf"free port in {port}-{port} on 127.0.0.1, but all are taken; .*--master-ports"
        with pytest.raises(LaunchError, match=reason):
            make_world(ranks=1, master_ports=(port, port)).run_trial(REQUEST, None)


def test_more_hosts_than_the_cluster_has_are_refused_with_both_numbers(make_world) -> None:
    has = r"but the Ray cluster has 127\.0\.0\.1 with 2 CPUs; give the --address"
    with pytest.raises(LaunchError, match=f"need 2 hosts with 1, 1 CPUs .*, {has}"):
        make_world(devices_per_host=(1, 1)).run_trial(REQUEST, None)
    with pytest.raises(LaunchError, match="must add up to the 2 workers, but are 2, 1"):
        make_world(devices_per_host=(2, 1))
