"""A connection to Ray (by default private and local), and one actor per rank."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from autotune.deadlines import Call, Overdue, within
from autotune.errors import LaunchError
from runtime_rewriter.world.ray_actors import RankActor, fetch
from runtime_rewriter.world.ray_bundles import Room, bundle_of, fits, refuse_unknown_addresses
from runtime_rewriter.world.ray_connection import (
    RayPlace,
    connect,
    in_one_line,
    not_shipped,
    set_environment,
    sigterm_handler_kept,
    silent_ray_threads,
    start_private,
)
from runtime_rewriter.world.ray_folder import PrivateFolder
from runtime_rewriter.world.worker import Polled, WorkerLost

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0


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
        self.name = ""
        """Rank and host, once it is placed."""

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


class RayCluster:
    """A connection to Ray at a place; raises `LaunchError` if there is none.

    Every call to Ray has a deadline. If it expires, a local cluster is killed, which also ends the
    call; another one is left alone. Later calls are refused at once.
    """

    def __init__(self, place: RayPlace, workers: int, deadlines: Deadlines = Deadlines()) -> None:
        self.place = place
        self._deadlines = deadlines
        self._stuck = False
        set_environment(place)
        self._folder = PrivateFolder.create() if place.local else None
        self._quiet = contextlib.ExitStack()
        self._left = threading.Event()
        # The kernel kills Ray's servers when the thread that started them ends.
        joining = Call(lambda: self._join(workers), until=self._left)
        try:
            with sigterm_handler_kept():
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
            if self._folder is None:
                connect(self.place)
            else:
                start_private(workers, self._folder.for_ray)
        except ray.exceptions.RuntimeEnvSetupError as error:
            ray.shutdown()
            raise not_shipped(error) from error
        except Exception as error:  # Ray raises it itself if a server does not start
            ray.shutdown()
            raise self._unreachable(in_one_line(error)) from error

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

        Raises what `fetch` raises, with the name of a lost worker, and `RayStuck`.
        """

        def call() -> list[Any]:
            references = [
                getattr(worker.actor, method).remote(*arguments)
                for worker, method, arguments in calls
            ]
            results: list[Any] = fetch(references, timeout_s)
            return results

        try:
            return self.ask(call, timeout_s)
        except WorkerLost as error:
            name = _lost([worker for worker, _, _ in calls], error.__cause__)
            raise WorkerLost(f"{name}: {error}" if name else str(error)) from error.__cause__

    def _give_up(self) -> None:
        import ray

        self._stuck = True
        if self._folder is not None:
            self._quiet.enter_context(silent_ray_threads())
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
        rooms = rooms if spread else ((1, ""),) * workers
        refuse_unknown_addresses(rooms, nodes)
        if not fits(rooms, nodes, "CPU", spread):
            raise self._no_room(rooms, nodes, spread, "")
        gpu = {"GPU": 1.0} if fits(rooms, nodes, "GPU", spread) else {}
        bundles = [bundle_of(room, bool(gpu)) for room in rooms]
        group = placement_group(bundles, strategy="STRICT_SPREAD" if spread else "PACK")
        try:
            if not group.wait(self._deadlines.placement_s):
                raise self._no_room(rooms, nodes, spread, ", perhaps in use")
            actor_class = ray.remote(num_cpus=1, num_gpus=gpu.get("GPU", 0))(RankActor)
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


def _lost(workers: list[RemoteWorker], error: BaseException | None) -> str:
    """The name of the worker that Ray's error is about; empty if it is not known."""
    if len(workers) == 1:
        return workers[0].name
    actor = getattr(error, "actor_id", None)
    return next((one.name for one in workers if one.actor._actor_id.hex() == actor), "")
