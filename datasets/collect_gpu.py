"""Measure step times and traces of real models on one GPU: `python datasets/collect_gpu.py`.

It needs a CUDA GPU, torchvision and transformers (`pip install torchvision transformers`); weights
are random. For every model it writes:

| what | where |
|---|---|
| step times and peak memory of the model and its variants | `times.json` |
| a recording of the plain model and under autocast, one rank | `MODEL.fp32/`, `MODEL.amp_bf16/` |
| the same of two ranks that share the GPU (`--pairs`) | `MODEL.two_ranks/` |

Folders of other models stay. Ranks use DDP over NCCL; those of a pair send through the loopback.

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autotune
from autotune.jobs.campaign.one_gpu import own_host_environment

ROOT = Path(__file__).parents[1]
WARM_STEPS, TIMED_STEPS, ISSUED_STEPS = 10, 40, 7
TRACED_STEPS = 2
PAIR_TIMEOUT_S = 300.0

console = Console(stderr=True, highlight=False, markup=False)


@dataclass(frozen=True)
class TimedModel:
    """`build` returns the module, `draw` a batch; `loss` takes the module and the batch."""

    build: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[Any, tuple[Tensor, ...]], Tensor]
    batch: int
    adam: bool
    images: bool


def _images(batch: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 3, 224, 224, device="cuda"), torch.randint(
        1000, (batch,), device="cuda"
    )


def _loss_of_images(model: Any, drawn: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(drawn[0]), drawn[1])


def _loss_of_text(model: Any, drawn: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = model(input_ids=drawn[0], labels=drawn[0]).loss
    return loss


def _vision(name: str, batch: int) -> TimedModel:
    def build() -> nn.Module:
        import torchvision

        model: nn.Module = getattr(torchvision.models, name)()
        return model

    return TimedModel(build, _images, _loss_of_images, batch, adam=False, images=True)


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    model: nn.Module = BertForMaskedLM(BertConfig())
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model


def _text(build: Callable[[], nn.Module], words: int, batch: int, length: int) -> TimedModel:
    def draw(count: int) -> tuple[Tensor, ...]:
        return (torch.randint(words, (count, length), device="cuda"),)

    return TimedModel(build, draw, _loss_of_text, batch, adam=True, images=False)


MODELS = {
    "resnet50": _vision("resnet50", 64),
    "vgg19": _vision("vgg19", 64),
    "densenet121": _vision("densenet121", 64),
    "bert_base": _text(_bert, 30522, 32, 128),
    "gpt2": _text(_gpt2, 50257, 8, 512),
}


@dataclass(frozen=True)
class Variant:
    """How a model is trained.

    `optimizer`: how torch updates the parameters (a kernel for many, one for each, or one for all).
    `precision`: `fp32` (no TF32), `tf32`, or the dtype of autocast. `parts`: micro-batches of an
    update, which together are the same batch.
    """

    name: str
    precision: str = "fp32"
    optimizer: str = "foreach"
    channels_last: bool = False
    recompute: bool = False
    parts: int = 1
    batch_factor: float = 1.0
    compiled: bool = False

    def fits(self, model: TimedModel) -> bool:
        return not (self.channels_last and not model.images) and not (
            self.recompute and model.images
        )


PLAIN = Variant("fp32")
TRACED = (PLAIN, Variant("amp_bf16", "bf16"))
VARIANTS = (
    PLAIN,
    Variant("tf32", "tf32"),
    Variant("amp_bf16", "bf16"),
    Variant("amp_fp16", "fp16"),
    Variant("amp_bf16_channels_last", "bf16", channels_last=True),
    Variant("optimizer_for_each", optimizer="for_each"),
    Variant("optimizer_fused", optimizer="fused"),
    Variant("recompute", recompute=True),
    Variant("accumulate_2", parts=2),
    Variant("half_batch", batch_factor=0.5),
)
COMPILED = (Variant("compiled", compiled=True), Variant("amp_bf16_compiled", "bf16", compiled=True))


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
    """Measure every variant of a model, and the plain one again at the end."""
    model, rows = MODELS[name], []
    for variant in (*(variant for variant in variants if variant.fits(model)), PLAIN):
        before_bytes = torch.cuda.memory_allocated()
        training = Training(model, variant)
        about = {
            "model": name,
            "variant": asdict(variant),
            "date": _today(),
            "torch": torch.__version__,
            "before_bytes": before_bytes,
        }
        rows.append(about | timed(training))
        del training
        _drop()
        console.log(
            f"{name} {variant.name}: {rows[-1]['step_ms']:.2f} ms, "
            f"issued in {rows[-1]['issue_ms']:.2f} ms"
        )
    return rows


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument(
        "--compile", action="store_true", help="the variants under torch.compile, too"
    )
    parser.add_argument("--pairs", action="store_true", help="two ranks on the GPU, too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed, but torch sees none")
    if options.rank is not None:
        _join(options.rank, 2, options.port)
        record(options.models[0], PLAIN, options.out)
        dist.destroy_process_group()
        return 0
    _join(0, 1, _free_port())
    options.out.mkdir(parents=True, exist_ok=True)
    times = options.out / "times.json"
    earlier = json.loads(times.read_text(encoding="utf-8")) if times.exists() else []
    rows: list[dict[str, Any]] = [row for row in earlier if row["model"] not in options.models]
    for name in options.models:
        rows += measure(name, VARIANTS + (COMPILED if options.compile else ()))
        times.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        folders = [options.out / f"{name}.{variant.name}" for variant in TRACED]
        for variant, folder in zip(TRACED, folders, strict=True):
            record(name, variant, folder)
        if options.pairs:
            folders.append(options.out / f"{name}.two_ranks")
            record_pair(name, folders[-1])
        for folder in folders:
            pack(folder)
        (options.out / "card.md").write_text(card(rows, options.out), encoding="utf-8")
        write_sums(options.out)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
