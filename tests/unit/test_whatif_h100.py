"""What-ifs of one GPU on the recorded H100 traces: finite, and never below the busiest queue."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from recorded_h100 import Recording

import autotune.whatif.changes.all  # noqa: F401
from autotune.dfg.graph import NONE
from autotune.errors import InvalidInput
from autotune.recordings.memory_file import RecordedMemory
from autotune.whatif.answers.predict import Prediction, predict
from autotune.whatif.base import Base
from autotune.whatif.changes.precision import product_calls
from autotune.whatif.memory import replica_memory
from autotune.whatif.question import Question
from autotune.whatif.registry import combined

NAMES = (
    *("faster_gpu", "no_data_loading", "cuda_graphs", "fused_elementwise", "kernel_times"),
    *("metaflow", "restructured_batchnorm", "vdnn", "gist"),
)
NO_LOADING = {"no_data_loading": "no data loading"}
NO_CNN = {
    **NO_LOADING,
    "restructured_batchnorm": "no batch normalization",
    "vdnn": "no convolutions",
    "gist": "no convolutions",
}
REFUSED = {
    "vgg19": {**NO_LOADING, "restructured_batchnorm": "no batch normalization"},
    "densenet121": NO_LOADING,
    "resnet50": NO_LOADING,
    "bert_base": NO_CNN,
    "gpt2": NO_CNN,
}
"""Why a model's trace gives no prediction."""
LARGEST, SIMILAR = "densenet121", "bert_base"
"""The model with the most ops, which takes as long as two others, and one much like `gpt2`."""
FASTER = {"faster_gpu", "cuda_graphs", "fused_elementwise", "restructured_batchnorm", "metaflow"}
SLOWER = {"vdnn", "gist"}


@pytest.fixture(scope="module")
def recording() -> Callable[[str], Recording]:
    """Each recording of this file, read once."""
    return cache(Recording)


def busiest_queue_s(base: Base) -> float:
    """Work of the queue that has the most of it: a step cannot take less."""
    busy_s = np.zeros(len(base.names.queues))
    working = base.queue != NONE
    np.add.at(busy_s, base.queue[working], base.duration_s[working])
    return float(busy_s.max())


def write_times(base: Base, path: Path) -> Path:
    """Half of its time for the kernel that takes most of a step."""
    kernels = [at for at in np.flatnonzero(base.on_device) if base.queue[at] != NONE]
    longest = max(kernels, key=lambda at: float(base.duration_s[at]))
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["kernel", "seconds"])
        rows.writerow([base.names.ops[longest], base.duration_s[longest] / 2])
    return path


def write_policy(base: Base, path: Path) -> Path:
    """Half of its time for the layer that takes most of a step."""
    device_s = np.zeros(len(base.names.layers))
    known = base.on_device & (base.layer != NONE)
    np.add.at(device_s, base.layer[known], base.duration_s[known])
    longest = base.names.layers[int(np.argmax(device_s))]
    path.write_text(json.dumps({"substitutions": [{"scale": {longest: 0.5}}]}))
    return path


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in (LARGEST, SIMILAR)))
        for name in sorted(REFUSED)
    ],
)
def test_predictions_are_finite_and_plausible(
    model: str, tmp_path: Path, recording: Callable[[str], Recording]
) -> None:
    of_model = recording(f"{model}.fp32")
    base = of_model.base
    recorded = RecordedMemory.read(of_model.folder)
    assert recorded is not None
    memory = replica_memory(of_model.job, 0, recorded.profile, recorded.batch)
    times = write_times(base, tmp_path / "times.csv")
    policy = write_policy(base, tmp_path / "policy.yaml")
    files = {"kernel_times": str(times), "metaflow": str(policy)}
    asked = Question(amounts={"vdnn": 25.0}, files=files, memory=memory)
    for name in NAMES:
        if reason := REFUSED[model].get(name):
            with pytest.raises(InvalidInput, match=reason):
                predict(base, combined(name), asked)
            continue
        found = predict(base, combined(name), asked)
        assert np.isfinite([found.speedup_low, found.speedup, found.speedup_high]).all(), name
        assert found.speedup_low <= found.speedup <= found.speedup_high, name
        assert found.after_s >= busiest_queue_s(found.base) * (1 - 1e-9), name
        if name in FASTER:
            assert 1 - 1e-6 <= found.speedup_high < 10, name
        if name in SLOWER:
            assert 0.1 < found.speedup <= 1 + 1e-6, name
            assert_memory_falls(found)


def device_s(base: Base) -> float:
    return float(base.duration_s[base.on_device].sum())


def without_shapes(base: Base) -> Base:
    operators = tuple(replace(one, inputs=None) for one in base.names.operators)
    return replace(base, names=replace(base.names, operators=operators))


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "gpt2")) for name in sorted(REFUSED)],
)
def test_traces_that_compute_in_16_bit_are_refused_by_types_or_by_names(
    model: str, recording: Callable[[str], Recording]
) -> None:
    """Attention of fp32 traces, and copies, may use 16 bit in part: these stay accepted."""
    half = recording(f"{model}.amp_bf16").base
    single = recording(f"{model}.fp32").base
    for name in ("amp", "amp_fp16", "tf32"):
        for base in (half, without_shapes(half)):
            with pytest.raises(InvalidInput, match=r"already computes in 16 bit in (9\d|100)%"):
                predict(base, combined(name), Question())
        assert device_s(predict(single, combined(name), Question()).base) < device_s(single)
    for name in ("amp", "tf32"):
        after = predict(without_shapes(single), combined(name), Question()).base
        assert device_s(after) < device_s(single)
    for names in ("amp+tf32", "amp+amp_fp16", "tf32+amp"):
        with pytest.raises(InvalidInput, match="name only one of them"):
            predict(single, combined(names), Question())


@pytest.mark.parametrize(("name", "amount"), [("batch", 3.0), ("faster_gpu", 2.0)])
@pytest.mark.parametrize("precision", ["amp", "tf32"])
def test_precision_keeps_what_earlier_what_ifs_did_to_products(
    name, amount, precision, recording
) -> None:
    """Both orders are of one training: its kernels take about as long.

    Before, `batch+amp` predicted the products of the recorded batch.
    """
    base = recording("gpt2.fp32").base
    one, other = (
        predict(base, combined(names), Question(amounts={name: amount})).base
        for names in (f"{name}+{precision}", f"{precision}+{name}")
    )
    assert device_s(one) == pytest.approx(device_s(other), rel=0.1)


def test_products_of_repeated_passes_take_the_time_of_the_recorded_ones(recording) -> None:
    """Each product of the second part takes as long as that of the first one."""
    base = recording("gpt2.fp32").base
    after = predict(base, combined("accumulate+amp"), Question(amounts={"accumulate": 2.0})).base
    products = [call.ops for call in product_calls(base)]
    calls = {int(base.operator[ops[0]]) for ops in products}
    of_products = after.on_device & np.isin(after.operator, list(calls))
    names = {base.names.ops[op] for ops in products for op in ops.tolist()}
    of_products &= np.array([name in names for name in after.names.ops])
    recorded = after.event != NONE
    first_s, second_s = (
        float(after.duration_s[of_products & part].sum()) for part in (recorded, ~recorded)
    )
    assert second_s == pytest.approx(first_s, rel=1e-6)


@pytest.mark.parametrize("precision", ["amp", "tf32"])
def test_precision_is_named_before_recomputation(
    precision: str, recording: Callable[[str], Recording]
) -> None:
    base = recording("gpt2.fp32").base
    with pytest.raises(InvalidInput, match="name the precision first"):
        predict(base, combined(f"recompute+{precision}"), Question())
    assert predict(base, combined(f"{precision}+recompute"), Question()).after_s > 0


def assert_memory_falls(found: Prediction) -> None:
    memory = found.memory
    assert memory is not None, found.memory_reason
    assert 0 < memory.after_bytes < memory.before_bytes
    assert memory.batch_times_before is not None
    assert memory.batch_times_after is not None
    assert 1 < memory.batch_times_before < memory.batch_times_after
    assert memory.largest_batch_before is not None
    assert memory.largest_batch_after is not None
    assert memory.largest_batch_before < memory.largest_batch_after
