"""What-ifs that save memory report the peak and the largest batch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from layered_training import IMAGE, MAP_BYTES, conv, conv_back, layered

import autotune.whatif.changes.all  # noqa: F401
from autotune.errors import InvalidInput
from autotune.recordings.memory_profile import (
    Lifetime,
    MemoryProfile,
    Pass,
    Phase,
    Region,
    Segment,
    TensorRole,
)
from autotune.whatif.answers.predict import predict
from autotune.whatif.kernels.layer_roles import convolutions
from autotune.whatif.kernels.stashes import Stash, stash_inputs
from autotune.whatif.memory import NOT_RECORDED, ReplicaMemory, replica_memory
from autotune.whatif.question import Question
from autotune.whatif.recording.recorded import recorded_base
from autotune.whatif.registry import combined

LAYERS = 5
WEIGHT_BYTES = 16 * 16 * 3 * 3 * 4
FIXED_BYTES = 2 * LAYERS * WEIGHT_BYTES
WORKS = [
    *(conv(number) for number in range(1, LAYERS + 1)),
    *(conv_back(number) for number in range(LAYERS, 0, -1)),
]


def profile(left_out: int = 0) -> MemoryProfile:
    """Convolutions in a row. Each map lives from the layer that writes it to its reader's gradient.

    Layer k runs forward in segment k and backward in segment 2 * LAYERS - 1 - k.
    """
    names = [f"conv{number}.weight" for number in range(LAYERS)]
    forward = [Segment(Phase.FORWARD, reads=(name,)) for name in names]
    backward = [Segment(Phase.BACKWARD, readies=(name,)) for name in reversed(names)]
    held = [
        Lifetime(WEIGHT_BYTES, role, variable=name)
        for name in names[: LAYERS - left_out]
        for role in (TensorRole.PARAMETER, TensorRole.GRADIENT)
    ]
    maps = [
        Lifetime(MAP_BYTES, TensorRole.ACTIVATION, number - 1, 2 * LAYERS - 1 - number)
        for number in range(1, LAYERS)
    ]
    return MemoryProfile(
        "model", "cuda", (*forward, *backward, Segment(Phase.UPDATE)), (*held, *maps)
    )


MEMORY = ReplicaMemory(profile(), batch=IMAGE[0], device_bytes=FIXED_BYTES + 8 * MAP_BYTES)
"""Four maps at the peak: the device holds twice the batch."""


def test_offloading_leaves_two_maps_on_the_device() -> None:
    base = recorded_base(layered(WORKS), 0)
    asked = Question(amounts={"vdnn": 100.0}, memory=MEMORY)
    found = predict(base, combined("vdnn"), asked).memory
    assert found is not None
    assert found.before_bytes == FIXED_BYTES + 4 * MAP_BYTES
    assert found.after_bytes == FIXED_BYTES + 2 * MAP_BYTES
    assert (found.batch_times_before, found.batch_times_after) == (2.0, 4.0)
    assert (found.largest_batch_before, found.largest_batch_after) == (16, 32)


def test_encoded_maps_take_their_share() -> None:
    layers = convolutions(recorded_base(layered(WORKS), 0))
    encoded = stash_inputs(MEMORY, layers, Stash(left_share=0.625, back_ahead=0))
    assert encoded.peak_bytes == FIXED_BYTES + math.ceil(3.25 * MAP_BYTES)
    none = stash_inputs(MEMORY, layers, Stash(0.0, 0), chosen=[False] * LAYERS)
    assert none.peak_bytes == MEMORY.peak_bytes


def test_an_input_is_stashed_once() -> None:
    """Two layers of the same size read one map: what the first one stashes is gone for both."""
    layers = convolutions(recorded_base(layered(WORKS), 0))
    lifetimes = MEMORY.profile.lifetimes
    shared = tuple(one for one in lifetimes if one.born != 1)
    memory = replace(MEMORY, profile=replace(MEMORY.profile, lifetimes=shared))
    stashed = stash_inputs(memory, layers, Stash(0.0, 1))
    maps = [one.bytes for one in stashed.profile.lifetimes if one.kind is TensorRole.ACTIVATION]
    assert sum(maps) == 2 * 2 * MAP_BYTES + MAP_BYTES  # two split into two parts, one untouched


def test_unknown_memory_is_refused_by_reason() -> None:
    base = recorded_base(layered(WORKS), 0)
    asked = Question(amounts={"vdnn": 100.0})
    found = predict(base, combined("vdnn"), asked)
    assert (found.memory, found.memory_reason) == (None, NOT_RECORDED)
    other = replace(MEMORY, profile=profile(left_out=1))
    found = predict(base, combined("vdnn"), replace(asked, memory=other))
    assert found.memory is None
    assert "are trace and memory of the same training?" in found.memory_reason
    plain = predict(base, combined("faster_gpu"), replace(asked, memory=MEMORY))
    assert (plain.memory, plain.memory_reason) == (None, "")


def test_the_largest_batch_needs_the_batch_and_the_device() -> None:
    assert replace(MEMORY, device_bytes=None).batch_times is None
    assert replace(MEMORY, batch=None).largest_batch is None
    assert replace(MEMORY, batch=None).batch_times == 2.0
    assert replace(MEMORY, device_bytes=FIXED_BYTES - 1).largest_batch == 0
    with pytest.raises(InvalidInput, match="batch must be at least 1"):
        replace(MEMORY, batch=0)


def test_temporaries_of_a_segment_grow_with_the_batch() -> None:
    """A temporary next to the maps, half of it freed before the rest is allocated."""
    temporary = Lifetime(4 * MAP_BYTES, TensorRole.TEMPORARY, 3, 3)
    relieved = [
        replace(segment, relief_bytes=2 * MAP_BYTES) if number == 3 else segment
        for number, segment in enumerate(MEMORY.profile.segments)
    ]
    changed = replace(
        MEMORY.profile, segments=tuple(relieved), lifetimes=(*MEMORY.profile.lifetimes, temporary)
    )
    memory = replace(MEMORY, profile=changed)
    assert memory.peak_bytes == FIXED_BYTES + 6 * MAP_BYTES
    assert memory.batch_times == pytest.approx(8 / 6)
    double = memory.with_batch(2.0)
    assert double.peak_bytes == FIXED_BYTES + 12 * MAP_BYTES
    assert double.batch_times == pytest.approx(8 / 6)


def test_memory_comes_from_the_recording_and_the_device_from_the_trace() -> None:
    devices = {"deviceProperties": [{"id": 0, "totalGlobalMem": 2**34}, {"totalGlobalMem": 2**33}]}
    job = layered(WORKS, info=devices)
    found = replica_memory(job, 0, profile(), batch=8)
    assert found is not None
    assert (found.batch, found.device_bytes) == (8, 2**33)
    unknown = replica_memory(layered(WORKS), 0, profile())
    assert unknown is not None
    assert (unknown.batch, unknown.device_bytes) == (None, None)


def of_blocks() -> ReplicaMemory:
    """Each layer is a block of a list, and keeps a second map for its own backward pass.

    Nine maps at the peak, five if the blocks are computed again; the device holds 18.
    """
    regions, lifetimes = [], list(MEMORY.profile.lifetimes)
    for number in range(LAYERS):
        back = 2 * LAYERS - 1 - number
        regions.append(Region(f"blocks.{number}", (Pass(number, number, back),)))
        inside = Lifetime(MAP_BYTES, TensorRole.ACTIVATION, number, back, region=number)
        lifetimes.append(inside)
    profile = replace(MEMORY.profile, lifetimes=tuple(lifetimes), regions=tuple(regions))
    return replace(MEMORY, profile=profile, device_bytes=FIXED_BYTES + 18 * MAP_BYTES)


def changed_memory(names: str, memory: ReplicaMemory, **amounts: float) -> ReplicaMemory:
    """The memory after all of `names`, each as its registered function changes it."""
    base = recorded_base(layered(WORKS), 0)
    for one in combined(names):
        assert one.memory is not None
        memory = one.memory(memory, base, Question(amounts=amounts))
    return memory


@pytest.mark.parametrize(
    ("names", "maps", "times"),
    [
        ("batch", 18, 2),
        ("accumulate", 2.25, 1),
        ("recompute", 5, 1),
        ("batch+recompute", 10, 2),
        ("accumulate+recompute", 1.25, 1),
        ("recompute+accumulate", 1.25, 1),
    ],
)
def test_each_what_if_of_a_combination_changes_the_memory(
    names: str, maps: float, times: float
) -> None:
    """`maps` at the peak, of the recorded batch; `times`: the new batch over the recorded one."""
    memory = changed_memory(names, of_blocks(), batch=2.0, accumulate=4.0)
    assert memory.peak_bytes == FIXED_BYTES + maps * MAP_BYTES
    assert memory.batch_times == pytest.approx(times * 18 / maps)


def test_inputs_of_another_batch_are_stashed_whole() -> None:
    base = recorded_base(layered(WORKS), 0)
    asked = Question(amounts={"vdnn": 100.0, "batch": 2.0}, memory=MEMORY)
    memory = predict(base, combined("batch+vdnn"), asked).memory
    assert memory is not None
    assert memory.before_bytes == memory.after_bytes == FIXED_BYTES + 4 * MAP_BYTES
    assert (memory.largest_batch_before, memory.largest_batch_after) == (16, 32)


def test_inputs_are_stashed_before_the_batch_is_cut_into_parts() -> None:
    stashed = changed_memory("vdnn+accumulate", MEMORY, accumulate=2.0)
    assert stashed.peak_bytes == FIXED_BYTES + MAP_BYTES
    with pytest.raises(InvalidInput, match="named behind this what-if"):
        changed_memory("accumulate+vdnn", MEMORY, accumulate=2.0)


def test_the_memory_of_another_precision_is_unknown() -> None:
    assert all(combined(name)[0].memory_unknown for name in ("amp", "amp_fp16", "amp_cpu"))
    base = recorded_base(layered(WORKS), 0)
    half = replace(combined("amp")[0], change=lambda base, question: base)
    asked = Question(amounts={"vdnn": 100.0}, memory=MEMORY)
    prediction = predict(base, (half, *combined("vdnn")), asked)
    assert prediction.memory is None and "under autocast" in prediction.memory_reason
    assert predict(base, (half,), asked).memory_reason == ""
