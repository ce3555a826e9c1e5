"""A trained simulator as an MLflow model: safetensors, JSON and this module's name, no pickle.

MLflow calls `_load_pyfunc` of this module to load the model, so the environment needs autotune. The
model's requirements leave it out: the project of that name on PyPI is another one. The input is a
table with the columns `strategy`, `workload` and `cluster`, each canonical JSON. The output is
predicted seconds per step, lower is better. Strategies are replayed as in the job that trained the
simulator.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.features.extract import Extractor
from autotune.files import read_text
from autotune.parsing import parse_json
from autotune.simulators.interface import Simulator
from autotune.simulators.replay_settings import ReplaySettings
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.strategy import Strategy
from autotune.tracking.connection import Connection
from autotune.workload import Workload

COLUMNS = ("strategy", "workload", "cluster")


def save_model(connection: Connection, name: str, folder: Path) -> None:
    """Log the simulator in `folder` on the job's run and register it, unless both are done.

    Raises MLflow's exceptions. A tracking store without a registry gets the logged model only.
    """
    client = connection.client
    query = f"source_run_id = '{connection.parent_id}' AND name = '{name}'"
    models = client.search_logged_models([connection.experiment_id], filter_string=query)
    model = (
        models[0]
        if models
        else client.create_logged_model(
            connection.experiment_id,
            name=name,
            source_run_id=connection.parent_id,
            model_type="simulator",
        )
    )
    if model.status != "READY":
        with tempfile.TemporaryDirectory() as temporary:
            packed = _pack(name, folder, Path(temporary), model.model_id)
            client.log_model_artifacts(model.model_id, str(packed))
        model = client.finalize_logged_model(model.model_id, "READY")
    _register(connection, f"autotune-{name}", model)


def _pack(name: str, folder: Path, temporary: Path, model_id: str) -> Path:
    """A directory in MLflow's model format."""
    data = temporary / "data"
    shutil.copytree(folder, data / "simulator")
    (data / "name").write_text(name, encoding="utf-8")
    packed = temporary / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow warns about its own type hints in pyfunc
        import mlflow.pyfunc
        from mlflow.models import Model, ModelSignature
        from mlflow.types import ColSpec, Schema

        mlflow.pyfunc.save_model(
            str(packed),
            loader_module=__name__,
            data_path=str(data),
            mlflow_model=Model(model_id=model_id),
            signature=ModelSignature(
                Schema([ColSpec("string", column) for column in COLUMNS]),
                Schema([ColSpec("double")]),
            ),
            pip_requirements=_requirements(),
            metadata={"autotune": version("autotune")},
        )
    return packed


def _requirements() -> list[str]:
    """The installed versions of the packages that autotune needs to load a simulator."""
    from packaging.requirements import Requirement

    pinned = []
    for needed in map(Requirement, requires("autotune") or ()):
        if needed.marker is None or needed.marker.evaluate({"extra": "torch"}):
            with suppress(PackageNotFoundError):
                pinned.append(f"{needed.name}=={version(needed.name).partition('+')[0]}")
    return pinned


def _register(connection: Connection, registered_name: str, model: Any) -> None:
    from mlflow.exceptions import MlflowException

    client, run_id = connection.client, connection.parent_id
    try:
        client.create_registered_model(registered_name)
    except MlflowException as error:
        if error.error_code in ("FEATURE_DISABLED", "NOT_IMPLEMENTED"):
            return
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    query = f"name = '{registered_name}' and run_id = '{run_id}'"
    if not client.search_model_versions(query):
        # "models:/ID" would be looked up at the global tracking URI, which is not set.
        location, tags = model.artifact_location, {"autotune.tuning.job": connection.job_id}
        client.create_model_version(
            registered_name, location, run_id, tags=tags, model_id=model.model_id
        )


class _TrackedSimulator:
    """The object that `mlflow.pyfunc.load_model` wraps."""

    def __init__(self, simulator: Simulator, replays: ReplaySettings) -> None:
        self._simulator, self._replays = simulator, replays

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> FloatArray:
        """Predicted seconds per step, shape (rows,), of a table with the columns `COLUMNS`."""
        features = []
        extractors: dict[tuple[str, str], Extractor] = {}
        for strategy_text, workload_text, cluster_text in zip(
            *(model_input[column] for column in COLUMNS), strict=True
        ):
            domain = workload_text, cluster_text
            if domain not in extractors:
                workload = Workload.from_data(parse_json(workload_text, "workload"))
                cluster = Cluster.from_data(parse_json(cluster_text, "cluster"))
                extractors[domain] = self._replays.extractor(workload, cluster)
            extractor = extractors[domain]
            planned = PlannedStrategy.of(
                Strategy.from_json(strategy_text), extractor.workload, extractor.cluster.world_size
            )
            features.append(extractor.replayed(extractor.features(planned), planned.plan))
        return self._simulator.predict_step_s(features)


def _load_pyfunc(path: str) -> _TrackedSimulator:
    """Load the directory that `_pack` created; MLflow calls this."""
    from autotune.simulators.registry import SIMULATORS

    folder = Path(path)
    name = read_text(folder / "name", max_bytes=100)
    if name not in SIMULATORS:
        raise InvalidInput(
            f"the logged simulator must be one of {', '.join(SIMULATORS)}, but is {name!r}; "
            "update autotune"
        )
    simulator = SIMULATORS[name]()
    simulator.load(folder / "simulator")
    return _TrackedSimulator(simulator, ReplaySettings.load(folder / "simulator"))
