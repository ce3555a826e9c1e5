"""Define the order of the test files and the fixtures that several of them use.

The only conftest of the tests: two modules of one name could not be type-checked in one run.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import few_jobs
import hypothesis
import pytest

if TYPE_CHECKING:
    from autotune.dfg.graph import Dfg
    from runtime_rewriter.world.world import World

# On a busy machine any example may take longer than Hypothesis lets one take. A change is judged by
# the same examples as the one before; `make test-all` looks for new ones.
hypothesis.settings.register_profile("known", deadline=None, derandomize=True)
hypothesis.settings.register_profile("new", deadline=None, derandomize=False)
hypothesis.settings.load_profile("known")
gc.disable()  # while pytest imports the test files: see `pytest_collection_finish`

JOB_TIMEOUT_S = 600.0
SMALL = Path(__file__).parent / "scripts" / "train_small.py"

LONGEST_FIRST = (
    "test_tune_command",
    "test_tensorflow_servers",
    "test_tensorflow_rewriter",
    "test_frameworks",
    "test_horovod_tensorflow",
    "test_mirrored_script",
    "test_odd_scripts",
    "test_testbed_tune",
    "test_null_experiment",
    "test_profile_command",
    "test_torch_memory",
    "test_tracking",
    "test_kept_training",
    "test_apply",
    "test_world_faults",
    "test_ray_address",
    "test_ray_world",
    "test_horovod_torch",
    "test_tensorflow_profile",
    "test_interrupts",
    "test_keras_fit",
    "test_tensorflow_gate",
    "test_horovod_exported_groups",
    "test_horovod_faults",
    "test_tensorflow_op_fusion",
    "test_probe_command",
    "test_tensorflow_compressors",
    "test_recorder",
    "test_recorded_traces",
    "test_examples_train",
    "test_testbed_lifecycle",
    "test_testbed_network",
    "test_every_strategy",
    "test_compressed_training",
    "test_emulated_world",
    "test_measurement",
    "test_tuner",
    "test_torch_hooks",
    "test_torch_rank_failures",
    "test_torch_emulation",
    "test_reference_traces",
    "test_ranking_benchmark",
)
"""Files that run for half a minute or more. They start first, so that no process works alone.

Of the first ones only one tunes: when several jobs started at once, right after the set-up, their
ranks took more than two minutes to start. Files of jobs are apart, since few run at once
(`few_jobs`), and the process of a third file would wait.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if item.get_closest_marker("job"):
            item.add_marker(pytest.mark.timeout(JOB_TIMEOUT_S), append=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # the time limit of a test excludes its wait
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with few_jobs.turn() if item.get_closest_marker("job") else contextlib.nullcontext():
        return (yield)


def pytest_collection_finish() -> None:
    """Let this process compute on one thread, and let its collections visit no imports.

    Several test files run side by side. Threads of OpenMP and OpenBLAS that wait for each other
    spin, most of all on a busy machine. Test files import two million objects.
    """
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    with contextlib.suppress(ImportError):  # scikit-learn brings it
        import threadpoolctl

        threadpoolctl.threadpool_limits(1)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder that `make(folder)` has filled, for all processes of this test run."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, unfinished = root / name, root / f"{name}-unfinished"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tracking_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow store in SQLite without runs; MLflow takes five seconds to create one."""

    def make(folder: Path) -> None:
        code = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).search_experiments()"
        subprocess.run(
            [sys.executable, "-c", code, f"sqlite:///{folder / 'mlflow.db'}"],
            check=True,
            capture_output=True,
            timeout=240,
            cwd=folder,
        )

    return made_once(tmp_path_factory, "tracking", make) / "mlflow.db"


@pytest.fixture(scope="session")
def example_plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example plugin; return the folder to put on the path."""

    def make(folder: Path) -> None:
        source = folder / "source"  # a build writes next to its sources
        shutil.copytree(Path(__file__).parents[1] / "examples/plugin", source)
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target"]
        words = [*options, str(folder / "site"), str(source)]
        subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True, timeout=240)

    return made_once(tmp_path_factory, "plugin", make) / "site"


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Return `make_world(*words, script=SMALL, **options of local_world)` and close its worlds."""
    from local_world import local_world

    worlds: list[World] = []

    def make(
        *words: str, script: Path = SMALL, directory: Path = tmp_path, **options: Any
    ) -> World:
        worlds.append(local_world(script, words, directory, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def bed_directory(tmp_path: Path) -> Iterator[Path]:
    """Return the folder that records this test's testbeds; take down all that it left."""
    from autotune.testbed import bed

    yield tmp_path / "state"
    for status in bed.testbeds(directory=tmp_path / "state"):
        bed.down(status.layout.name, directory=tmp_path / "state")


@pytest.fixture
def bed_name(request: pytest.FixtureRequest) -> str:
    return f"test-{os.getpid()}-{abs(hash(request.node.name)) % 10**6}"


@pytest.fixture
def chain() -> Dfg:
    """A graph of a hundred ops of one second, each after the one before."""
    from autotune.dfg.build import DfgBuilder
    from autotune.dfg.graph import Kind

    builder = DfgBuilder()
    queue = builder.queue("device")
    for op in range(100):
        builder.op(f"op{op}", queue, 1.0, Kind.FORWARD, [op - 1] if op else [])
    return builder.build()


@pytest.fixture
def without_privileges() -> Iterator[None]:
    """Let permissions apply to this process: root ignores them."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
