"""Measure step times and traces of real models on one GPU: `python datasets/collect_gpu.py`.

It needs a CUDA GPU, torchvision and transformers (`pip install torchvision transformers`); weights
are random. For every model it writes:

| what | where |
|---|---|
| step times and peak memory of the model and its variants | `times.json` |
| recordings of the plain model and of some variants, one rank | `MODEL.VARIANT/` |
| a recording of two ranks that share the GPU (`--pairs`) | `MODEL.two_ranks/` |

It measures what the folder lacks; `--again` measures everything. `--list` shows what is missing and
needs no GPU. Ranks use DDP over NCCL; those of a pair send through the loopback.

CUDA events between a variant's steps time them, without waiting for each. The plain model is
measured again at the end, which shows a changed clock. Two ranks on one GPU take turns: their
traces show what is sent, but not how fast a cluster is.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from gpu_models import MODELS, TimedModel
from gpu_variants import PLAIN, Variant, Work, missing_work, pair_folder, recording_folder
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autotune
from autotune.jobs.campaign.one_gpu import own_host_environment

ROOT = Path(__file__).parents[1]
WARM_STEPS, TIMED_STEPS, ISSUED_STEPS = 10, 40, 7
TRACED_STEPS = 2
PAIR_TIMEOUT_S = 300.0

console = Console(stderr=True, highlight=False, markup=False)


class Training:
    """One model under a variant; `step` runs a whole training step."""

    def __init__(self, model: TimedModel, variant: Variant) -> None:
        tf32 = variant.precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        torch.manual_seed(0)
        self.module = cast(Any, model.build().cuda().train())
        if variant.channels_last:
            self.module.to(memory_format=torch.channels_last)
        if variant.recompute:
            self.module.gradient_checkpointing_enable()
        self.model: Any = torch.compile(self.module) if variant.compiled else self.module
        self._optimizer = _optimizer(self.module, model.adam, variant.optimizer)
        self._loss, self._parts = model.loss, variant.parts
        self.batch = int(model.batch * variant.batch_factor)
        drawn = model.draw(self.batch)
        if variant.channels_last:
            drawn = (drawn[0].contiguous(memory_format=torch.channels_last), *drawn[1:])
        self._batches = list(zip(*(tensor.chunk(variant.parts) for tensor in drawn), strict=True))
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(variant.precision)
        self._scaler = torch.amp.GradScaler("cuda", enabled=variant.precision == "fp16")

    def step(self) -> None:
        self._optimizer.zero_grad()
        for batch in self._batches:
            with self._precision():
                loss = self._loss(self.model, batch) / self._parts
            self._scaler.scale(loss).backward()
        self._scaler.step(self._optimizer)
        self._scaler.update()

    def _precision(self) -> AbstractContextManager[object]:
        return nullcontext() if self._dtype is None else torch.autocast("cuda", self._dtype)


def _optimizer(module: nn.Module, adam: bool, kind: str) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"foreach": kind == "foreach"} if kind != "fused" else {"fused": True}
    if adam:
        return torch.optim.Adam(module.parameters(), lr=1e-4, **options)
    return torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, **options)


def timed(training: Training) -> dict[str, Any]:
    """Return milliseconds of the steps and of issuing one to an idle device, and peak memory."""
    for _ in range(WARM_STEPS):
        training.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        training.step()
        mark.record()
    torch.cuda.synchronize()
    issued_s = []
    for _ in range(ISSUED_STEPS):
        torch.cuda.synchronize()
        begun_s = time.perf_counter()
        training.step()
        issued_s.append(time.perf_counter() - begun_s)
    step_ms = [before.elapsed_time(after) for before, after in pairwise(marks)]
    low, *_, high = statistics.quantiles(step_ms, n=10)
    return {
        "step_ms": statistics.median(step_ms),
        "step_ms_q10": low,
        "step_ms_q90": high,
        "issue_ms": statistics.median(issued_s) * 1e3,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "batch": training.batch,
    }


def measure(name: str, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Measure every variant of a model, and the plain one before (if missing) and at the end."""
    model, rows = MODELS[name], []
    for variant in (*variants, PLAIN):
        before_bytes = torch.cuda.memory_allocated()
        training = Training(model, variant)
        about = {
            "model": name,
            "variant": asdict(variant),
            "date": _today(),
            **_versions(),
            "before_bytes": before_bytes,
        }
        try:
            rows.append(about | timed(training))
        except RuntimeError as error:  # out of memory, or no compiler
            console.log(f"{name} {variant.name} is left out: {error}")
            continue
        finally:
            del training
            _drop()
        console.log(
            f"{name} {variant.name}: {rows[-1]['step_ms']:.2f} ms, "
            f"issued in {rows[-1]['issue_ms']:.2f} ms"
        )
    return rows


def _versions() -> dict[str, str]:
    return {"torch": torch.__version__}


def _of_now(row: Mapping[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in _versions().items())


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def record(name: str, variant: Variant, folder: Path) -> None:
    """Record this rank's part of a DDP job."""
    training = Training(MODELS[name], variant)
    ddp = DistributedDataParallel(training.model, device_ids=[torch.cuda.current_device()])
    training.model = ddp
    recorder = autotune.Recorder(ddp, folder=folder, steps=TRACED_STEPS, record_shapes=True)
    step = autotune.profile(recorder)(training.step)
    while not recorder.written:
        step()
    training.model = None
    del ddp, step, recorder, training
    _drop()


def _drop() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def _join(rank: int, size: int, port: int) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def record_pair(name: str, folder: Path) -> None:
    """Run two processes of this script, `--rank` 0 and 1."""
    words = [
        sys.executable,
        __file__,
        "--out",
        str(folder),
        "--models",
        name,
        "--port",
        str(_free_port()),
    ]
    ranks = [
        subprocess.Popen(
            [*words, "--rank", str(rank)],
            env=os.environ | own_host_environment(rank) | {"PYTHONPATH": _path()},
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            if rank.wait(timeout=PAIR_TIMEOUT_S):
                raise RuntimeError(f"a rank of {name} ended with exit status {rank.returncode}")
    finally:
        for rank in ranks:
            rank.kill()


def _path() -> str:
    return os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])


def pack(folder: Path) -> None:
    """Compress the traces of a folder as well as gzip can, without the time in their headers."""
    for path in folder.glob("*.json.gz"):
        content = gzip.decompress(path.read_bytes())
        path.write_bytes(gzip.compress(content, compresslevel=9, mtime=0))


def card(rows: Sequence[dict[str, Any]], out: Path) -> str:
    device = torch.cuda.get_device_properties(0)
    versions, dates = ({row[key] for row in rows} for key in ("torch", "date"))
    lines = [
        f"# {device.name}: step times and traces of real models",
        "",
        f"{device.name} ({device.total_memory / 2**30:.0f} GiB, "
        f"{device.multi_processor_count} multiprocessors), torch "
        f"{' and '.join(sorted(versions))}, {platform.machine()} with {os.cpu_count()} cores, "
        f"{' and '.join(sorted(dates))}; `python datasets/collect_gpu.py`, which defines the "
        "variants. Random weights and inputs.",
        "",
        f"A time is the median of {TIMED_STEPS} steps after {WARM_STEPS}, with the deciles; the "
        "last row of a model repeats its first. Issuing is the processor's time for a step that "
        f"finds the device idle, the median of {ISSUED_STEPS}. With more than about a thousand "
        "waiting kernels, or with a gradient scaler (fp16), it includes waiting for the device. If "
        "issuing takes as long as the step, the processor may be the bottleneck.",
        "",
        "Peak memory is that of torch's allocator, without what it held before the model.",
        "",
        "| model | variant | batch | step (ms) | 10 % to 90 % "
        "| issued in (ms) | peak memory (MB) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        span = f"{row['step_ms_q10']:.2f} to {row['step_ms_q90']:.2f}"
        variant, step = row["variant"]["name"], f"{row['step_ms']:.2f}"
        peak_mb = (row["peak_bytes"] - row["before_bytes"]) / 1e6
        cells = (row["model"], variant, row["batch"], step, span, f"{row['issue_ms']:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} | {peak_mb:.0f} |")
    folders = sorted(path.name for path in out.iterdir() if path.is_dir())
    lines += [
        "",
        f"Traces ({TRACED_STEPS} steps, with shapes): {', '.join(folders) or 'none'}. `two_ranks` "
        "are two processes that share the GPU: NCCL's messages use the loopback's sockets and the "
        "ranks take turns, so their times are not those of a cluster.",
        "",
        "Licence: CC-BY-4.0.",
    ]
    return "\n".join(lines) + "\n"


def write_sums(out: Path) -> None:
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    sums = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(out)}\n"
        for path in files
    ]
    (out / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")


def main(words: Sequence[str] | None = None, versions: Mapping[str, str] | None = None) -> int:
    """`versions`: of the software that measures; usually the installed ones."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--pairs", action="store_true", help="two ranks on the GPU, too")
    parser.add_argument("--again", action="store_true", help="measure what is there, too")
    parser.add_argument("--list", action="store_true", help="show what is missing and end")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    traits = {name: MODELS[name].traits for name in options.models}
    works = missing_work(
        options.out,
        traits,
        rows_in(options.out),
        versions or _versions(),
        pairs=options.pairs,
        again=options.again,
    )
    if options.list:
        console.print("\n".join(map(described, works)) or "nothing is missing", soft_wrap=True)
        return 0
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, but torch sees none; --list needs none")
    if options.rank is not None:
        _join(options.rank, 2, options.port)
        record(options.models[0], PLAIN, options.out)
        dist.destroy_process_group()
        return 0
    _join(0, 1, _free_port())
    options.out.mkdir(parents=True, exist_ok=True)
    for work in works:
        console.log(described(work))
        _do(work, options.out)
    dist.destroy_process_group()
    return 0


def rows_in(out: Path) -> list[dict[str, Any]]:
    times = out / "times.json"
    rows: list[dict[str, Any]] = (
        json.loads(times.read_text(encoding="utf-8")) if times.exists() else []
    )
    return rows


def described(work: Work) -> str:
    parts = [
        "times of " + ", ".join(variant.name for variant in work.timed) if work.timed else "",
        "recordings of " + ", ".join(one.name for one in work.recorded) if work.recorded else "",
        "a recording of two ranks" if work.pair else "",
    ]
    return f"{work.model}: {'; '.join(part for part in parts if part)}"


def _do(work: Work, out: Path) -> None:
    """Measure and record one model, and write the files anew."""
    if work.timed:
        names = {variant.name for variant in work.timed}
        kept = [
            row
            for row in rows_in(out)
            if row["model"] != work.model or (row["variant"]["name"] not in names and _of_now(row))
        ]
        rows = kept + measure(work.model, work.timed)
        text = json.dumps(sorted(rows, key=lambda row: row["model"]), indent=1) + "\n"
        (out / "times.json").write_text(text, encoding="utf-8")
    folders = [recording_folder(out, work.model, variant) for variant in work.recorded]
    for variant, folder in zip(work.recorded, folders, strict=True):
        record(work.model, variant, folder)
    if work.pair:
        folders.append(pair_folder(out, work.model))
        record_pair(work.model, folders[-1])
    for folder in folders:
        pack(folder)
    (out / "card.md").write_text(card(rows_in(out), out), encoding="utf-8")
    write_sums(out)


if __name__ == "__main__":
    sys.exit(main())
