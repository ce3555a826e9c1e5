"""A connection to Ray (by default private and local), and one actor per rank."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autotune.deadlines import Call, Overdue, within
from autotune.errors import AutotuneError, LaunchError, raised_line
from runtime_rewriter.file_view import FileView
from runtime_rewriter.world.ray_folder import PrivateFolder
from runtime_rewriter.world.ray_start import REGISTERED_S, quick_start
from runtime_rewriter.world.views import HeldView, Protected, held_view
from runtime_rewriter.world.worker import Polled, ProcessSupervisor, WorkerLost, free_port

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
SERVER_GONE_S = 7 * 86400
"""Longer than any job: our own deadlines end the calls."""
LOOPBACK = "127.0.0.1"
_PINNED = 0.001
"""Amount of a node's own resource `node:ADDRESS` (1 on that node) that pins a bundle to the
node."""

Room = tuple[int, str]
"""A number of ranks on one node, and the node's address ("": any node)."""


@dataclass(frozen=True)
class WorkerPlace:
    """The node that an actor is on. `logs`: directory of Ray's session there."""

    node: str
    name: str
    address: str
    gpus: tuple[str, ...]
    logs: str


class _Actor(ProcessSupervisor):
    """The supervisor, the place it is on, and the view of files that its host's ranks share."""

    _view: HeldView | None = None

    def place(self) -> WorkerPlace:
        import ray
        import ray._private.worker

        context = ray.get_runtime_context()
        node: Any = ray._private.worker._global_node  # the only source of the session directory
        return WorkerPlace(
            node=context.get_node_id(),
            name=socket.gethostname(),
            address=str(ray.util.get_node_ip_address()),  # type: ignore[no-untyped-call]
            gpus=tuple(str(gpu) for gpu in ray.get_gpu_ids()),
            logs=str(node.get_logs_dir_path()),
        )

    def reserve_port(self, first: int, last: int, host: str) -> int:
        return free_port(first, last, host)

    def renew_view(self, protected: Protected, own_directory: bool) -> FileView:
        """Make a fresh view in place of the last one, with `own_directory` also of ours.

        Raises `LaunchError`.
        """
        self.end_view()
        own = (str(Path.cwd()),) if own_directory else ()
        self._view = held_view(protected.here(own), socket.gethostname())
        return self._view.view

    def end_view(self) -> None:
        if self._view is not None:
            self._view.end()
            self._view = None


@dataclass(frozen=True)
class Deadlines:
    """Time that Ray has for a call; one of its servers may be frozen, and block it forever.

    start_s: to start, or to send the code to its hosts. It takes 41 s on two busy cores.
    answer_s: to answer, after its own time limits. It takes milliseconds.
    placement_s: to find room, which others may use.
    shutdown_s: to end by itself. It takes 2 s.
    """

    start_s: float = 300.0
    answer_s: float = 30.0
    placement_s: float = 60.0
    shutdown_s: float = 20.0


class RayStuck(LaunchError):
    """Ray did not answer in time; its cluster was given up."""


class RemoteWorker:
    """Implements `Worker` by calls to an actor of `cluster`, each with a timeout."""

    def __init__(self, cluster: RayCluster, actor: Any) -> None:
        self._cluster = cluster
        self.actor = actor

    def call(self, method: str, *arguments: Any) -> Any:
        calls = [(self, method, arguments)]
        return self._cluster.results(calls, CALL_TIMEOUT_S)[0]

    def start(
        self, words: list[str], environment: dict[str, str], directory: str, log_path: str
    ) -> None:
        self.call("start", words, environment, directory, log_path)

    def instruct(self, line: str) -> None:
        self.call("instruct", line)

    def poll(self, timeout_s: float) -> Polled:
        polled: Polled = self.call("poll", timeout_s)
        return polled

    def terminate(self) -> None:
        self.call("terminate")

    def stop(self) -> None:
        self.call("stop")


def fetch(references: Any, timeout_s: float) -> Any:
    """The results of calls to actors.

    It may block for longer: see `RayCluster.ask`. Raises the actor's own error if it is an
    `AutotuneError`, `LaunchError` if the code cannot be sent to its host, and `WorkerLost`
    otherwise.
    """
    import ray

    try:
        return ray.get(references, timeout=timeout_s)
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise _not_shipped(error) from error
    except ray.exceptions.RayTaskError as error:
        cause = error.as_instanceof_cause()  # type: ignore[no-untyped-call]
        ours = cause if isinstance(cause, AutotuneError) else WorkerLost(_in_one_line(cause))
        raise ours from error
    except ray.exceptions.RayError as error:
        raise WorkerLost(_in_one_line(error)) from error


@dataclass(frozen=True)
class RayPlace:
    """A Ray cluster. Without an address a private one is started, on loopback only, with a token.

    shared_directory: the script's directory exists on every host of the address; otherwise it is
        sent there.
    bare: the script needs no directory (it is a module of ours).
    one_machine: all nodes are on this machine (in a testbed), with this installation and files.
    node_address: address of this process's node, if Ray cannot find it out.
    interface: network interface of gloo ("": the one that the host's name resolves to).
    token: token of the cluster's nodes ("": the environment's).
    """

    address: str | None = None
    shared_directory: bool = False
    one_machine: bool = False
    node_address: str = ""
    interface: str = ""
    token: str = ""
    bare: bool = False

    @property
    def local(self) -> bool:
        return self.address is None

    @property
    def same_files(self) -> bool:
        """Whether every rank has the files of this process."""
        return self.local or self.one_machine

    @property
    def directory(self) -> str:
        """Directory in which the ranks start ("": the one that Ray unpacked)."""
        shared = self.shared_directory and not self.bare
        return str(Path.cwd()) if self.same_files or shared else ""


class RayCluster:
    """A connection to Ray at a place; raises `LaunchError` if there is none.

    Every call to Ray has a deadline. If it expires, a local cluster is killed, which also ends the
    call; another one is left alone. Later calls are refused at once.
    """

    def __init__(self, place: RayPlace, workers: int, deadlines: Deadlines = Deadlines()) -> None:
        self.place = place
        self._deadlines = deadlines
        self._stuck = False
        _set_environment(place)
        self._folder = PrivateFolder.create() if place.local else None
        self._quiet = contextlib.ExitStack()
        self._left = threading.Event()
        # The kernel kills Ray's servers when the thread that started them ends.
        joining = Call(lambda: self._join(workers), until=self._left)
        try:
            with _sigterm_handler_kept():
                joining.result(deadlines.start_s)
        except BaseException as error:
            if self._folder is not None:
                # A thread that was left behind may start more processes.
                self._folder.kill() if joining.running else self._folder.end()
            if isinstance(error, Overdue):
                raise self._unreachable(f"no answer within {deadlines.start_s:g} s") from None
            raise

    def _join(self, workers: int) -> None:
        import ray

        try:
            _connect(self.place) if self._folder is None else _start(workers, self._folder.for_ray)
        except ray.exceptions.RuntimeEnvSetupError as error:
            ray.shutdown()
            raise _not_shipped(error) from error
        except Exception as error:  # Ray raises it itself if a server does not start
            ray.shutdown()
            raise self._unreachable(_in_one_line(error)) from error

    def _unreachable(self, reason: str) -> LaunchError:
        reason = reason.rstrip(".")
        if self.place.local:
            return LaunchError(
                f"a local Ray cluster could not be started: {reason}; start the command again"
            )
        return LaunchError(
            f"the Ray cluster at {self.place.address!r} cannot be reached: {reason}; "
            "check `ray status` and the address"
        )

    def ask(self, call: Callable[[], T], limit_s: float = 0.0) -> T:
        """Call into Ray; `limit_s`: the call's own time limit.

        Raises `RayStuck`, and gives the cluster up, if the call has not returned by its deadline.
        """
        return self._asked(call, limit_s + self._deadlines.answer_s)

    def _asked(self, call: Callable[[], T], deadline_s: float) -> T:
        import ray

        if not self._stuck:
            try:
                return within(deadline_s, call)
            except (Overdue, ray.exceptions.GetTimeoutError):  # the latter: a limit of Ray's own
                self._give_up()
        fix = "start the command again"
        if not self.place.local:
            fix = "look at `ray status`, and at the processes gcs_server and raylet of each node"
        raise RayStuck(f"Ray no longer answers; {fix}")

    def results(
        self, calls: list[tuple[RemoteWorker, str, tuple[Any, ...]]], timeout_s: float
    ) -> list[Any]:
        """The results of calls (worker, method, arguments) to actors, made at once.

        Raises what `fetch` raises, and `RayStuck`.
        """

        def call() -> list[Any]:
            references = [
                getattr(worker.actor, method).remote(*arguments)
                for worker, method, arguments in calls
            ]
            results: list[Any] = fetch(references, timeout_s)
            return results

        return self.ask(call, timeout_s)

    def _give_up(self) -> None:
        import ray

        self._stuck = True
        if self._folder is not None:
            self._quiet.enter_context(_silent_ray_threads())
            self._folder.kill()
        atexit.unregister(ray.shutdown)  # it would block the exit

    def reserve(self, workers: int, rooms: tuple[Room, ...]) -> tuple[Any, list[RemoteWorker]]:
        """A placement group and one actor per rank in it, room by room.

        Several rooms are on one node each. Otherwise the ranks share as few nodes as possible.
        Raises `LaunchError` if the cluster has no room.
        """
        return self.ask(lambda: self._reserve(workers, rooms), self._deadlines.placement_s)

    def release(self, group: Any) -> None:
        """End the actors of a placement group, and free their room."""
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(RayStuck):  # then they end with the cluster
            self.ask(lambda: remove_placement_group(group))

    def _reserve(self, workers: int, rooms: tuple[Room, ...]) -> tuple[Any, list[RemoteWorker]]:
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        spread = len(rooms) > 1
        rooms = _with_known_addresses(rooms, nodes) if spread else ((1, ""),) * workers
        if not _fits(rooms, nodes, "CPU", spread):
            raise self._no_room(rooms, nodes, spread, "")
        gpu = {"GPU": 1.0} if _fits(rooms, nodes, "GPU", spread) else {}
        bundles = [_bundle(room, bool(gpu)) for room in rooms]
        group = placement_group(bundles, strategy="STRICT_SPREAD" if spread else "PACK")
        try:
            if not group.wait(self._deadlines.placement_s):
                raise self._no_room(rooms, nodes, spread, ", perhaps in use")
            actor_class = ray.remote(num_cpus=1, num_gpus=gpu.get("GPU", 0))(_Actor)
            pinned = [
                PlacementGroupSchedulingStrategy(group, index)
                for index, (ranks, _) in enumerate(rooms)
                for _ in range(ranks)
            ]
            return group, [
                RemoteWorker(self, actor_class.options(scheduling_strategy=place).remote())
                for place in pinned
            ]
        except BaseException:
            remove_placement_group(group)
            raise

    def _no_room(
        self, rooms: tuple[Room, ...], nodes: list[dict[str, Any]], spread: bool, remark: str
    ) -> LaunchError:
        need = f"{len(rooms)} CPUs"
        if spread:
            named = [f"{ranks} at {address}" if address else str(ranks) for ranks, address in rooms]
            need = f"{len(rooms)} hosts with {', '.join(named)} CPUs"
        have = ", ".join(
            f"{node['NodeManagerAddress']} with {node['Resources'].get('CPU', 0):.0f} CPUs"
            for node in nodes
        )
        fix = "start more Ray nodes, or ask for fewer workers"
        if self.place.local:
            fix = "give the --address of a cluster of such hosts"
        return LaunchError(
            f"the ranks need {need} (one for each rank), but the Ray cluster has "
            f"{have or 'none'}{remark}; {fix}"
        )

    def close(self) -> None:
        """Leave the cluster, and end a local one: by force if it does not end in time."""
        import ray

        with contextlib.suppress(RayStuck):
            self._asked(ray.shutdown, self._deadlines.shutdown_s)
        self._left.set()
        if self._folder is not None:
            if self._stuck:  # with its servers dead, the rest in this process ends; it still writes
                self._folder.kill()
                with contextlib.suppress(Overdue):
                    within(self._deadlines.shutdown_s, ray.shutdown)
            self._folder.end()
            self._folder = None
        self._quiet.close()


@contextlib.contextmanager
def _silent_ray_threads() -> Iterator[None]:
    """Let Ray's own threads print no stack trace when its servers are killed."""
    before = threading.excepthook

    def hook(end: threading.ExceptHookArgs) -> None:
        if end.thread is None or not end.thread.name.startswith("ray_"):
            before(end)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def _set_environment(place: RayPlace) -> None:
    """Set the variables that Ray reads when it is imported."""
    if place.local:
        # Otherwise Ray binds the first real interface, and without a token it is open to everybody.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # By default Ray gives up a GCS that takes more than 20 s to start.
        os.environ["RAY_gcs_server_port_wait_time_s"] = f"{REGISTERED_S:.0f}"  # noqa: SIM112
    elif place.one_machine:
        # it has several nodes, unlike an earlier local cluster
        os.environ.pop("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", None)
    if place.local or place.token:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = place.token or secrets.token_hex(32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # By default Ray ends this process without a word when its server is gone for a minute.
    os.environ["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(SERVER_GONE_S)  # noqa: SIM112
    # With Ray's default of 15, everything else on the machine would precede the trials.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray's own spelling
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"


def _start(workers: int, folder: Path) -> None:
    with quick_start():
        _init(
            address="local",
            num_cpus=workers,  # a slot per rank, however many cores there are
            include_dashboard=False,
            object_store_memory=100_000_000,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder),
        )


def _connect(place: RayPlace) -> None:
    options: dict[str, Any] = {"address": place.address}
    if place.node_address:
        options["_node_ip_address"] = place.node_address
    if not place.one_machine:
        options["runtime_env"] = _runtime_environment(place.shared_directory or place.bare)
    _init(**options)


def _runtime_environment(shared_directory: bool) -> dict[str, Any]:
    """The files that Ray sends to its hosts: our code and the script's directory."""
    import autotune
    import runtime_rewriter

    packages = [str(Path(str(package.__file__)).parent) for package in (autotune, runtime_rewriter)]
    environment: dict[str, Any] = {
        "py_modules": packages,
        "excludes": [".git", ".venv", "autotune-jobs", "*.db", "__pycache__"],
    }
    if not shared_directory:
        environment["working_dir"] = str(Path.cwd())
    return environment


def _init(**options: Any) -> None:
    import ray
    from ray import _raylet

    # It warns of a missing handler of SIGTERM, which is ours.
    logging.getLogger("ray").setLevel(logging.ERROR)
    loader: Any = _raylet.AuthenticationTokenLoader  # type: ignore[attr-defined]  # no public way
    loader.instance().reset_cache()  # forget the token of this process's earlier cluster
    quiet: dict[str, Any] = {
        "logging_level": "ERROR",
        "log_to_driver": False,
        "configure_logging": False,
    }
    ray.init(**options, **quiet)


@contextlib.contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Restore the process's own handler, which Ray's compiled code replaces."""
    # only the main thread may set one
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # None: set by another language, which Python cannot set again
            signal.signal(signal.SIGTERM, before)


def _with_known_addresses(rooms: tuple[Room, ...], nodes: list[dict[str, Any]]) -> tuple[Room, ...]:
    """The rooms without addresses that no node has, such as addresses of another network."""
    known = {node["NodeManagerAddress"] for node in nodes}
    return tuple((ranks, address if address in known else "") for ranks, address in rooms)


def _fits(
    rooms: tuple[Room, ...], nodes: list[dict[str, Any]], resource: str, spread: bool
) -> bool:
    """Whether idle nodes have one `resource` per rank; with `spread`, one node per room."""
    free = [
        (float(node["Resources"].get(resource, 0)), node["NodeManagerAddress"]) for node in nodes
    ]
    if not spread:
        return sum(int(amount) for amount, _ in free) >= len(rooms)
    free.sort()
    for ranks, address in sorted(rooms, key=lambda room: (not room[1], -room[0])):
        chosen = max((entry for entry in free if address in ("", entry[1])), default=(0.0, ""))
        if chosen[0] < ranks:
            return False
        free.remove(chosen)
    return True


def _bundle(room: Room, gpus: bool) -> dict[str, float]:
    ranks, address = room
    bundle = {"CPU": float(ranks)}
    if gpus:
        bundle["GPU"] = float(ranks)
    if address:
        bundle[f"node:{address}"] = _PINNED
    return bundle


def _not_shipped(error: Exception) -> LaunchError:
    text = raised_line(str(error)) or " ".join(str(error).split())[:600]
    return LaunchError(
        f"the script's directory {Path.cwd()} must be sent to the hosts of the Ray cluster, but "
        "that "
        f"failed: {text}; start in a smaller directory (data elsewhere), or use --shared-directory "
        "if this directory exists on every host"
    )


def _in_one_line(error: BaseException) -> str:
    """The error without the traceback that Ray writes into it."""
    text = str(error).strip() or type(error).__name__
    return raised_line(text) or text.splitlines()[0]
