"""The `autotune` command: reads argv and the environment, prints, and turns errors into messages.

Exit status: 0 done, 1 the job failed, 2 the input was wrong, 130 interrupted (a job of `tune` can be resumed).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune import __version__
from autotune.errors import AutotuneError, InvalidInput
from autotune.records import Accelerators
from autotune.tuning.job import DEFAULT_SIMULATORS, Search, Similarity

DIRECTORY = "autotune-jobs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    ours, command = split_words(words)
    options = _parser().parse_args(ours)
    options.command = command
    run: Callable[[argparse.Namespace], tuple[dict[str, Any], str]] = options.run
    try:
        data, text = run(options)
    except InvalidInput as error:
        return _fail(options, error, 2)
    except AutotuneError as error:
        return _fail(options, error, 1)
    except KeyboardInterrupt:
        return _fail(options, AutotuneError(options.interrupted), 130)
    print(json.dumps(data, indent=2) if options.json else text)
    return int(data.get("exit_status", 0))


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own words, and the user's command after the first `--`."""
    if "--" not in words:
        return list(words), []
    cut = list(words).index("--")
    return list(words[:cut]), list(words[cut + 1 :])


def _fail(options: argparse.Namespace, error: Exception, status: int) -> int:
    if options.json:
        print(
            json.dumps(
                {"error": str(error), "kind": type(error).__name__, "exit_status": status}, indent=2
            )
        )
    print(f"autotune: {error}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autotune",
        description="Find the fastest gradient synchronization for a training script.",
    )
    parser.set_defaults(interrupted="interrupted")
    parser.add_argument("--version", action="version", version=f"autotune {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on stdout"
    )
    shared.add_argument(
        "--directory",
        type=Path,
        default=Path(DIRECTORY),
        help=f"where jobs are kept (default {DIRECTORY})",
    )
    tracking = argparse.ArgumentParser(add_help=False)
    tracking.add_argument(
        "--tracking-uri", help="MLflow tracking URI (default: SQLite in the job directory)"
    )
    tracking.add_argument(
        "--experiment", default="autotune", help="MLflow experiment (default autotune)"
    )
    _add_tune(commands, [shared, tracking])
    _add_probe(commands, [shared])
    _add_show(commands, [shared])
    _add_export(commands, [shared])
    _add_run(commands, [shared])
    _add_profile(commands)
    _add_track(commands, [shared, tracking])
    _add_strategies(commands, [shared])
    _add_replay(commands, [shared])
    _add_optimize(commands, [shared])
    _add_testbed(commands)
    return parser


def _add_tune(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    tune = commands.add_parser(
        "tune",
        parents=parents,
        help="tune a training script: autotune tune [options] -- torchrun ... train.py args",
        description="Runs the script on a Ray cluster, tries strategies between its steps, exports the best one.",
    )
    tune.set_defaults(
        run=_run_tune,
        interrupted="interrupted; finished trials are kept, `autotune tune --resume` goes on",
    )
    tune.add_argument(
        "job_file", nargs="?", type=Path, help="a job.yaml; options given here override it"
    )
    tune.add_argument("--job", help="id of the job (default: script name and time)")
    tune.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="JOB",
        help="go on with JOB (default: the latest unfinished one)",
    )
    tune.add_argument(
        "--address",
        help="a running Ray cluster, for example auto or 10.0.0.1:6379 (default: start a local one)",
    )
    tune.add_argument(
        "--shared-directory",
        action="store_true",
        help="the current directory exists on every host: send nothing along",
    )
    tune.add_argument("--cluster", type=Path, help="cluster.yaml (default: this machine)")
    emulation = tune.add_argument_group("emulation")
    _add_emulation(emulation)
    emulation.add_argument(
        "--profile",
        type=Path,
        metavar="WORKLOAD",
        help="what they wait for (default: what one replica alone takes)",
    )
    tune.add_argument("--workers", type=int, help="number of ranks, where the command does not say")
    tune.add_argument(
        "--master-ports",
        default="0-0",
        metavar="FIRST-LAST",
        help="ports rank 0 may listen on (default: any)",
    )
    budget = tune.add_argument_group("budget")
    budget.add_argument(
        "--budget-time", help="for example 5min (default 30min, or no limit with --budget-trials)"
    )
    budget.add_argument(
        "--budget-trials",
        type=int,
        help="candidate trials (default 60, or no limit with --budget-time)",
    )
    search = tune.add_argument_group("search")
    search.add_argument(
        "--search",
        choices=[member.value for member in Search],
        help="default autosync; the others are baselines",
    )
    search.add_argument(
        "--simulators",
        help=f"comma-separated, of {', '.join(DEFAULT_SIMULATORS)} (default: all) and plugins",
    )
    search.add_argument(
        "--similarity",
        choices=[member.value for member in Similarity],
        help="of Eq. 11 (default choices)",
    )
    search.add_argument("--diversity", type=float, help="alpha of Eq. 11 (default 0.4)")
    search.add_argument(
        "--lossy",
        action="store_true",
        default=None,
        help="also try lossy compression: fp16, bf16, int8, top-k, PowerSGD",
    )
    search.add_argument(
        "--samples-per-round", type=int, help="strategies scored per round (default 300)"
    )
    search.add_argument("--top-k", type=int, help="trials per round (default 6)")
    search.add_argument("--seed", type=int, help="default 0")
    trial = tune.add_argument_group("trials")
    trial.add_argument("--warmup-steps", type=int, help="untimed steps of a trial (default 2)")
    trial.add_argument(
        "--timed-steps",
        type=int,
        help="timed steps of a trial, of each further batch and of an A/B block (default 8)",
    )
    trial.add_argument(
        "--most-steps",
        type=int,
        help="timed steps that a trial may take to reach --precision (default 40; 0: no more)",
    )
    trial.add_argument(
        "--precision",
        type=float,
        help="relative half width of its median's 95 %% interval that ends it (default 0.02)",
    )
    trial.add_argument(
        "--losing",
        type=float,
        help="a trial certainly above so many times the best ends early (default 1.15)",
    )
    trial.add_argument(
        "--reference-every",
        type=int,
        help="candidates between two runs of the current setup (default 6)",
    )
    trial.add_argument(
        "--deviation",
        type=float,
        help="relative deviation of the reference that marks trials, at most (default 0.15)",
    )
    trial.add_argument(
        "--ab-pairs",
        type=int,
        help="pairs of blocks of the closing comparison, at most (default 20)",
    )
    trial.add_argument(
        "--ab-precision",
        type=float,
        help="relative half width of its interval that ends it (default 0.01)",
    )
    trial.add_argument("--confidence", type=float, help="of its interval (default 0.95)")
    trial.add_argument("--step-timeout", help="a rank silent for so long is hung (default 60s)")
    trial.add_argument("--start-timeout", help="time until the first training step (default 2min)")
    trial.add_argument(
        "--probe-time",
        help="for probing the links, at most (default 20s; 0s: the fits in the cluster file are used)",
    )


def _add_emulation(emulation: Any) -> None:
    emulation.add_argument(
        "--testbed",
        type=Path,
        metavar="CLUSTER",
        help="emulate this cluster.yaml's network here (root)",
    )
    emulation.add_argument(
        "--byte-scale",
        type=float,
        metavar="K",
        help="its links and messages divided by K (default 1)",
    )
    accelerators = [member.value for member in Accelerators]
    emulation.add_argument(
        "--accelerators",
        choices=accelerators,
        help="emulated: timed waits, no computation (default real)",
    )


def _add_probe(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    probe = commands.add_parser(
        "probe", parents=parents, help="measure the links of a cluster and write its cluster file"
    )
    probe.set_defaults(run=_run_probe)
    probe.add_argument(
        "--workers", type=int, help="number of ranks (default: the devices of --cluster)"
    )
    probe.add_argument(
        "--cluster", type=Path, help="cluster.yaml (default: the hosts that the ranks are found on)"
    )
    probe.add_argument(
        "--address",
        help="a running Ray cluster, for example auto or 10.0.0.1:6379 (default: start a local one)",
    )
    _add_emulation(probe.add_argument_group("emulation"))
    probe.add_argument(
        "--output",
        "-o",
        type=Path,
        default=Path("probed.yaml"),
        help="the cluster file to write (default probed.yaml)",
    )
    probe.add_argument(
        "--budget-time",
        default="1min",
        help="for the probing, besides the start of the ranks (default 1min)",
    )
    probe.add_argument(
        "--master-ports",
        default="0-0",
        metavar="FIRST-LAST",
        help="ports rank 0 may listen on (default: any)",
    )
    probe.add_argument(
        "--step-timeout",
        default="60s",
        help="a rank silent for so long, and for the budget, is hung (default 60s)",
    )
    probe.add_argument(
        "--start-timeout", default="2min", help="time until the ranks are up (default 2min)"
    )


def _add_show(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    show = commands.add_parser(
        "show", parents=parents, help="the jobs, or one job's trials and decision"
    )
    show.set_defaults(run=_run_show)
    show.add_argument("job", nargs="?", help="default: list all jobs")


def _add_export(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    export = commands.add_parser(
        "export", parents=parents, help="write a strategy as a file for the training script"
    )
    export.set_defaults(run=_run_export)
    export.add_argument("job", nargs="?", help="default: the latest job")
    export.add_argument(
        "--strategy",
        help="a measured strategy's id or its beginning (default: what the job decided)",
    )
    export.add_argument("--output", "-o", type=Path, default=Path("best.json"))


def _add_run(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        parents=parents,
        help="run a script with an exported strategy: autotune run --strategy best.json -- ...",
    )
    run.set_defaults(run=_run_run)
    run.add_argument("--strategy", type=Path, required=True, help="the exported file")


def _add_profile(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="record training steps of a script on every rank: autotune profile -- torchrun ... train.py args",
    )
    profile.set_defaults(run=_run_profile)
    profile.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on stdout"
    )
    profile.add_argument(
        "--output",
        "-o",
        type=Path,
        default=Path("autotune-profile"),
        help="folder of the traces (default autotune-profile)",
    )
    profile.add_argument(
        "--overwrite", action="store_true", help="even where the folder holds a recording"
    )
    profile.add_argument("--steps", type=int, default=10, help="steps to record (default 10)")
    profile.add_argument(
        "--warmup",
        type=int,
        default=3,
        help="ordinary steps before anything is measured (default 3)",
    )
    profile.add_argument(
        "--timeout", default="10min", help="until everything is written (default 10min)"
    )
    profile.add_argument(
        "--go-on",
        action="store_true",
        help="let the script train on to its end (default: end it when all is written)",
    )
    profile.add_argument(
        "--no-workload",
        action="store_true",
        help="leave out the steps that measure one replica alone: its times and its memory",
    )
    more = profile.add_argument_group("more in the traces, at a cost")
    more.add_argument("--shapes", action="store_true", help="shapes of every operator's inputs")
    more.add_argument("--memory", action="store_true", help="allocations")
    more.add_argument("--stacks", action="store_true", help="Python stacks")


def _add_track(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    track = commands.add_parser(
        "track", parents=parents, help="send to MLflow what could not be sent while tuning"
    )
    track.set_defaults(run=_run_track)
    track.add_argument("job", nargs="?", help="default: the latest job")


def _add_strategies(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    strategies = commands.add_parser(
        "strategies", parents=parents, help="what hand-made strategies do with a model on a cluster"
    )
    strategies.set_defaults(run=_run_strategies)
    strategies.add_argument(
        "model", nargs="?", help="a name such as bert-large, or the JSON file of a workload"
    )
    strategies.add_argument(
        "cluster",
        nargs="?",
        help="a name such as B7 (B7-single-flow: 10 Gbit/s between two nodes), or a cluster file",
    )
    strategies.add_argument(
        "--builder",
        help="one of them: what it does with every variable (default: all, side by side)",
    )
    strategies.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of a strategy"
    )


def _add_outputs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE",
        help="write the replayed timeline (.json or .json.gz) for Perfetto",
    )
    command.add_argument("--report", type=Path, metavar="FILE", help="write an HTML report")


def _add_replay(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser(
        "replay", parents=parents, help="what an iteration is made of: autotune replay TRACE..."
    )
    replay.set_defaults(run=_run_replay)
    replay.add_argument(
        "traces",
        nargs="+",
        help="Kineto traces of one job's ranks: files, folders, archives, or patterns",
    )
    replay.add_argument(
        "--step",
        default="median",
        help="number of the step (default: the one with the median time)",
    )
    replay.add_argument(
        "--hosts",
        default="",
        metavar="HOSTS",
        help="which ranks share a clock: a name per rank (a,a,b,b) or ranks per host",
    )
    replay.add_argument(
        "--no-align",
        dest="align",
        action="store_false",
        help="take the clocks of the ranks as they are",
    )
    _add_outputs(replay)


def _add_optimize(commands: Any, parents: list[argparse.ArgumentParser]) -> None:
    optimize = commands.add_parser(
        "optimize", parents=parents, help="search the fastest strategy by replay, without a cluster"
    )
    optimize.set_defaults(run=_run_optimize)
    optimize.add_argument(
        "source",
        help="a folder of `autotune profile`, Kineto traces, a workload's JSON, a layer profile, or a model such as bert-base",
    )
    optimize.add_argument(
        "--cluster",
        required=True,
        help="a cluster file (best one of `autotune probe`), or a name such as B7",
    )
    optimize.add_argument(
        "--lossy",
        action="store_true",
        help="also lossy compression: fp16, bf16, int8, top-k, PowerSGD",
    )
    optimize.add_argument(
        "--within-step", action="store_true", help="no synchronization into the next forward pass"
    )
    optimize.add_argument(
        "--op-fusion",
        action="store_true",
        help="also fuse the ops of a layer profile: for a graph engine, not enacted",
    )
    optimize.add_argument(
        "--memory",
        metavar="SIZE",
        help="that a replica may take, such as 16GB or 512MiB: recomputes or accumulates to fit",
    )
    optimize.add_argument(
        "--budget-time", default="10s", help="for the search, at most (default 10s)"
    )
    optimize.add_argument("--seed", type=int, default=0, help="default 0")
    optimize.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="write the strategy's JSON"
    )
    _add_outputs(optimize)


def _add_testbed(commands: Any) -> None:
    testbed = commands.add_parser(
        "testbed",
        help="emulated clusters on this machine (Linux, root): check, up, status, down, exec",
    )
    actions = testbed.add_subparsers(title="actions", required=True, metavar="ACTION")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on stdout"
    )
    where = "where testbeds are recorded (default /run/autotune-testbeds)"
    shared.add_argument(
        "--state-directory",
        type=Path,
        default=Path("/run/autotune-testbeds"),
        metavar="DIRECTORY",
        help=where,
    )
    actions.add_parser(
        "check", parents=[shared], help="what this machine can emulate"
    ).set_defaults(run=_run_testbed, action="check")
    up = actions.add_parser("up", parents=[shared], help="make the network of a cluster file")
    up.set_defaults(run=_run_testbed, action="up")
    up.add_argument("cluster_file", type=Path, metavar="CLUSTER", help="cluster.yaml")
    up.add_argument("--name", help="default: the cluster's")
    up.add_argument(
        "--byte-scale",
        type=float,
        default=1.0,
        metavar="K",
        help="divide every rate by K (default 1)",
    )
    status = actions.add_parser(
        "status", parents=[shared], help="what is up, with its rates, latencies and processes"
    )
    status.set_defaults(run=_run_testbed, action="status")
    down = actions.add_parser(
        "down", parents=[shared], help="take a testbed down, with every process inside"
    )
    down.set_defaults(run=_run_testbed, action="down")
    down.add_argument(
        "name",
        nargs="?",
        help="default: leftovers of dead owners, and the testbed of `up` if it is the only one",
    )
    down.add_argument("--all", action="store_true", help="all of them, also those in use")
    execute = actions.add_parser(
        "exec",
        parents=[shared],
        help="run a command inside: autotune testbed exec NAME HOST -- COMMAND",
    )
    execute.set_defaults(run=_run_testbed, action="execute")
    execute.add_argument("name", help="of the testbed")
    execute.add_argument("host", help="as the cluster file names it")


# Each command's module loads when it is used: `autotune --help` stays instant.


def _run_tune(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.tune import tune

    return tune(options)


def _run_probe(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.probe import probe

    return probe(options)


def _run_show(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.show import show

    return show(options)


def _run_export(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.export import export

    return export(options)


def _run_run(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.run import run

    return run(options)


def _run_profile(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.profile import profile

    return profile(options)


def _run_track(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.track import track

    return track(options)


def _run_strategies(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.strategies import strategies

    return strategies(options)


def _run_replay(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.replay import replay

    return replay(options)


def _run_optimize(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands.optimize import optimize

    return optimize(options)


def _run_testbed(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from autotune.commands import testbed

    actions = {
        "check": testbed.check,
        "up": testbed.up,
        "status": testbed.status,
        "down": testbed.down,
        "execute": testbed.execute,
    }
    return actions[options.action](options)
