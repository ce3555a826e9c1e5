"""A trained simulator as an MLflow model: safetensors and JSON files and the name of this module, no pickle, no code.

MLflow calls `_load_pyfunc` of this module when the model is loaded. Its input is a table with the columns `strategy`,
`workload` and `cluster`, each canonical JSON; its output is predicted seconds per step, lower is better.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from autotune.arrays import FloatArray
from autotune.cluster import Cluster
from autotune.errors import InvalidInput
from autotune.features.extract import extract
from autotune.parsing import parse_json, read_text
from autotune.simulators.interface import Simulator
from autotune.strategy_space.plan import PlannedStrategy
from autotune.strategy_space.strategy import Strategy
from autotune.workload import Workload

COLUMNS = ("strategy", "workload", "cluster")


def save_model(
    client: Any, experiment_id: str, run_id: str, job_id: str, name: str, folder: Path
) -> None:
    """Log the simulator that `Simulator.save` wrote to `folder` and register it, unless both were done before.

    Raises MLflow's exceptions. A tracking store without a registry gets the logged model only.
    """
    model = _logged(client, experiment_id, run_id, name)
    if model.status != "READY":
        with tempfile.TemporaryDirectory() as temporary:
            packed = _pack(name, folder, Path(temporary), model.model_id)
            client.log_model_artifacts(model.model_id, str(packed))
        model = client.finalize_logged_model(model.model_id, "READY")
    _register(client, f"autotune-{name}", model, run_id, job_id)


def _logged(client: Any, experiment_id: str, run_id: str, name: str) -> Any:
    """The run's logged model of this name, found or made."""
    found = client.search_logged_models(
        [experiment_id], filter_string=f"source_run_id = '{run_id}' AND name = '{name}'"
    )
    return (
        found[0]
        if found
        else client.create_logged_model(
            experiment_id, name=name, source_run_id=run_id, model_type="simulator"
        )
    )


def _pack(name: str, folder: Path, temporary: Path, model_id: str) -> Path:
    """A directory in MLflow's model format."""
    data = temporary / "data"
    shutil.copytree(folder, data / "simulator")
    (data / "name").write_text(name, encoding="utf-8")
    packed = temporary / "model"
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # MLflow warns of its own type hints when pyfunc is imported
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
            pip_requirements=[f"autotune[torch,mlflow]=={version('autotune')}"],
        )
    return packed


def _register(client: Any, registered_name: str, model: Any, run_id: str, job_id: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(registered_name)
    except MlflowException as error:
        if error.error_code in ("FEATURE_DISABLED", "NOT_IMPLEMENTED"):
            return
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = client.search_model_versions(f"name = '{registered_name}' and run_id = '{run_id}'")
    if not versions:
        # The registry would look up "models:/ID" at the global tracking URI, which is not set; the location needs none.
        tags = {"autotune.tuning.job": job_id}
        client.create_model_version(
            registered_name, model.artifact_location, run_id, tags=tags, model_id=model.model_id
        )


class _TrackedSimulator:
    """What `mlflow.pyfunc.load_model` wraps."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> FloatArray:
        """Predicted seconds per step, shape (rows,), of a table with the columns `COLUMNS`."""
        features = []
        for strategy_text, workload_text, cluster_text in zip(
            *(model_input[column] for column in COLUMNS), strict=True
        ):
            strategy = Strategy.from_json(strategy_text)
            workload = Workload.from_data(parse_json(workload_text, "workload"))
            cluster = Cluster.from_data(parse_json(cluster_text, "cluster"))
            planned = PlannedStrategy.of(strategy, workload, cluster.world_size)
            features.append(extract(planned, workload, cluster))
        return self._simulator.predict_step_s(features)


def _load_pyfunc(path: str) -> _TrackedSimulator:
    """Called by MLflow with the directory that `_pack` made."""
    from autotune.simulators.registry import SIMULATORS

    folder = Path(path)
    name = read_text(folder / "name", max_bytes=100)
    if name not in SIMULATORS:
        raise InvalidInput(
            f"the logged simulator must be one of {', '.join(SIMULATORS)}, but is {name!r}; update autotune"
        )
    simulator = SIMULATORS[name]()
    simulator.load(folder / "simulator")
    return _TrackedSimulator(simulator)
