"""Trains an LSTM on the bytes of a text with DistributedDataParallel and accumulated gradients.

    torchrun --nproc-per-node 2 examples/lstm_text.py
    python examples/lstm_text.py --epochs 1

Gradients are accumulated over --accumulate batches; only the last one synchronizes. Their norm is
clipped before the update. The last tenth of the text is held out.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

TEXT = Path(__file__).parent / "data" / "rust_book.txt"
BYTES = 256


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="LSTM on the bytes of a text, data-parallel.")
    parser.add_argument("--text", type=Path, default=TEXT, help="text to train on, in any encoding")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and batch")
    parser.add_argument(
        "--accumulate",
        type=int,
        default=2,
        help="batches per step; their gradients are added up before it",
    )
    parser.add_argument("--block-size", type=int, default=64, help="bytes per sequence")
    parser.add_argument(
        "--width", type=int, default=256, help="size of an embedding and of a layer's state"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--lr", type=float, default=3e-3, help="peak learning rate of the one-cycle schedule"
    )
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument(
        "--clip-grad-norm",
        type=float,
        default=1.0,
        help="largest norm of all gradients; 0: no clipping",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-steps", type=int, default=0, help="stop after this many steps; 0: no limit"
    )
    parser.add_argument(
        "--log-every", type=int, default=10, help="steps between two lines of output"
    )
    parser.add_argument("--checkpoint", type=Path, help="where rank 0 saves the trained weights")
    return parser.parse_args()


def load_data(text: Path, block_size: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and validation sequences (block_size + 1,) of bytes; neighbors share one byte."""
    symbols = torch.tensor(list(text.read_bytes()))
    split = len(symbols) * 9 // 10
    if min(split, len(symbols) - split) <= block_size:
        raise SystemExit(
            f"a text needs more than {10 * block_size + 10} bytes for --block-size {block_size}, "
            f"but has {len(symbols)}"
        )
    return (
        TensorDataset(symbols[:split].unfold(0, block_size + 1, block_size)),
        TensorDataset(symbols[split:].unfold(0, block_size + 1, block_size)),
    )


class LanguageModel(nn.Module):
    """LSTM over embedded bytes; output layer and embedding share a weight (Press, Wolf 2017)."""

    def __init__(self, width: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.drop = nn.Dropout(dropout)
        self.lstm = nn.LSTM(
            width, width, layers, batch_first=True, dropout=dropout if layers > 1 else 0.0
        )
        self.head = nn.Linear(width, BYTES)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        nn.init.zeros_(self.head.bias)
        self.head.weight = self.embedding.weight

    def forward(self, symbols: Tensor) -> Tensor:
        """Logits (batch, length, 256) of the byte after each of symbols (batch, length)."""
        states, _ = self.lstm(self.drop(self.embedding(symbols)))
        logits: Tensor = self.head(self.drop(states))
        return logits


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases alone."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    biases = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": biases, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def setup() -> torch.device:
    """Joins the process group that torchrun describes; without torchrun, a group of one."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(
            max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        )
    if "RANK" in os.environ:
        dist.init_process_group(backend=backend)
    else:
        dist.init_process_group(backend=backend, store=dist.HashStore(), rank=0, world_size=1)
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def loss_of(model: nn.Module, sequences: Tensor, reduction: str = "mean") -> Tensor:
    """Negative log-likelihood (nats) of all bytes but the first; sequences (batch, length + 1)."""
    logits = model(sequences[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], device: torch.device
) -> float:
    """Mean negative log-likelihood per held-out byte in nats, over all ranks."""
    model.eval()
    sums = torch.zeros(2, device=device)  # nats, bytes
    for (sequences,) in loader:
        nats = loss_of(model, sequences.to(device), "sum")
        sums += torch.stack([nats, torch.tensor(float(sequences[:, 1:].numel()), device=device)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def accumulate_gradients(model: DDP, batches: tuple[Tensor, ...]) -> Tensor:
    """The mean loss of all batches, whose gradients are synchronized with the last one."""
    loss = torch.zeros((), device=batches[0].device)
    for number, batch in enumerate(batches, start=1):
        with nullcontext() if number == len(batches) else model.no_sync():
            part = loss_of(model, batch) / len(batches)
            part.backward()
        loss += part.detach()
    return loss


def main() -> None:
    args = parse_args()
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, val_set = load_data(args.text, args.block_size)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(
        train_set, args.batch_size * args.accumulate, sampler=sampler, drop_last=True
    )
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=64)

    torch.manual_seed(args.seed)
    model = LanguageModel(args.width, args.layers, args.dropout).to(device)
    torch.manual_seed(args.seed + rank)  # every rank drops other units
    if rank == 0:
        million_parameters = sum(p.numel() for p in model.parameters()) / 1e6
        print(
            f"{million_parameters:.2f} M parameters, {world_size} rank(s) on {device.type}",
            flush=True,
        )
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    total_steps = args.epochs * len(train_loader)
    if total_steps < 1:
        batches = f"--batch-size {args.batch_size} times --accumulate {args.accumulate}"
        need = f"at least 1 epoch and {batches} sequences"
        raise SystemExit(
            f"a rank needs {need}, but has {args.epochs} epochs and {len(sampler)} sequences"
        )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps, pct_start=0.1, cycle_momentum=False
    )
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        started, first_step, loss_sum = time.perf_counter(), step, torch.zeros((), device=device)
        for (sequences,) in train_loader:
            optimizer.zero_grad()
            loss = accumulate_gradients(model, sequences.to(device).split(args.batch_size))
            if args.clip_grad_norm > 0:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
            scheduler.step()
            step += 1
            loss_sum += loss
            if rank == 0 and step % args.log_every == 0:
                print(f"step {step}/{last_step} loss {loss.item():.4f}", flush=True)
            if step == last_step:
                break
        steps = step - first_step
        dist.all_reduce(loss_sum)
        train_loss = loss_sum.item() / (steps * world_size)
        trained = steps * args.accumulate * args.batch_size * args.block_size * world_size
        bytes_per_s = trained / (time.perf_counter() - started)
        val_loss = evaluate(model.module, val_loader, device)
        if rank == 0:
            perplexity = math.exp(val_loss)
            losses = f"train_loss {train_loss:.4f} val_loss {val_loss:.4f} "
            losses += f"val_perplexity {perplexity:.2f}"
            print(f"epoch {epoch + 1} {losses} bytes/s {bytes_per_s:.0f}", flush=True)
        if step == last_step:
            break

    if args.checkpoint and rank == 0:
        torch.save(model.module.state_dict(), args.checkpoint)
    # Before its process group: torch 2.13 may wait for gloo's threads for ever if DDP outlives it.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
