"""Trains a small GPT on a text with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/gpt_text.py
    python examples/gpt_text.py --epochs 1

Words of the text are the tokens; the first nine tenths are trained on, the last tenth is held out.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

TEXT = Path(__file__).parent / "data" / "rust_book.txt"
TOKEN = re.compile(r"[a-z]+|[0-9]|[^\sa-z0-9]")
UNKNOWN = 0  # the token of every word outside the vocabulary


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GPT on a text, data-parallel.")
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 text to train on")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--block-size", type=int, default=64, help="tokens per sequence")
    parser.add_argument(
        "--vocabulary", type=int, default=2000, help="most frequent words that get a token"
    )
    parser.add_argument("--width", type=int, default=256, help="size of an embedding")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--lr",
        type=float,
        default=5e-4,
        help="peak learning rate; linear warm-up, then cosine decay",
    )
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument(
        "--clip-grad-norm",
        type=float,
        default=0.0,
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


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `block_size` tokens every `stride` tokens, with the window one token later."""

    def __init__(self, tokens: Tensor, block_size: int, stride: int) -> None:
        self.tokens, self.block_size, self.stride = tokens, block_size, stride

    def __len__(self) -> int:
        return (len(self.tokens) - 1 - self.block_size) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        window = self.tokens[start : start + self.block_size + 1]
        return window[:-1], window[1:]


def load_data(text: Path, vocabulary: int, block_size: int) -> tuple[Windows, Windows]:
    """Training windows that overlap by half, and validation windows that do not overlap."""
    words = TOKEN.findall(text.read_text(encoding="utf-8").lower())
    split = len(words) * 9 // 10
    known = {
        word: index + 1
        for index, (word, _) in enumerate(Counter(words[:split]).most_common(vocabulary - 1))
    }
    tokens = torch.tensor([known.get(word, UNKNOWN) for word in words])
    return Windows(tokens[:split], block_size, block_size // 2), Windows(
        tokens[split:], block_size, block_size
    )


class Block(nn.Module):
    """Causal self-attention and a feed-forward net, each after a LayerNorm, added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.drop(self.proj(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    """Decoder-only transformer; the output layer shares its weight with the token embedding."""

    def __init__(
        self, vocabulary: int, block_size: int, width: int, layers: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(block_size, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._init)
        self.head.weight = self.token_embedding.weight

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) of the token after each of tokens (batch, length)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.token_embedding(tokens) + self.position_embedding(positions))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def make_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves biases and LayerNorms alone."""
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def make_scheduler(
    optimizer: torch.optim.Optimizer, total_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over up to 20 steps, then cosine decay to a tenth of the peak."""
    warmup = min(20, max(1, total_steps // 10))

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


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


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]], device: torch.device
) -> float:
    """Mean negative log-likelihood per held-out token in nats, over all ranks."""
    model.eval()
    sums = torch.zeros(2, device=device)  # nats, tokens
    for inputs, targets in loader:
        logits = model(inputs.to(device))
        nats = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum")
        sums += torch.stack([nats, torch.tensor(float(targets.numel()), device=device)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def main() -> None:
    args = parse_args()
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    train_set, val_set = load_data(args.text, args.vocabulary, args.block_size)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=16)

    torch.manual_seed(args.seed)
    model = GPT(
        args.vocabulary, args.block_size, args.width, args.layers, args.heads, args.dropout
    ).to(device)
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
        need = f"at least 1 epoch and --batch-size {args.batch_size} sequences"
        raise SystemExit(
            f"a rank needs {need}, but has {args.epochs} epochs and {len(sampler)} sequences"
        )
    scheduler = make_scheduler(optimizer, total_steps)
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        started, first_step, loss_sum = time.perf_counter(), step, torch.zeros((), device=device)
        for inputs, targets in train_loader:
            logits = model(inputs.to(device))
            loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
            optimizer.zero_grad()
            loss.backward()
            if args.clip_grad_norm > 0:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            optimizer.step()
            scheduler.step()
            step += 1
            loss_sum += loss.detach()
            if rank == 0 and step % args.log_every == 0:
                print(f"step {step}/{last_step} loss {loss.item():.4f}", flush=True)
            if step == last_step:
                break
        steps = step - first_step
        dist.all_reduce(loss_sum)
        train_loss = loss_sum.item() / (steps * world_size)
        tokens_per_s = (
            steps * args.batch_size * args.block_size * world_size / (time.perf_counter() - started)
        )
        val_loss = evaluate(model.module, val_loader, device)
        if rank == 0:
            perplexity = math.exp(val_loss)
            losses = f"train_loss {train_loss:.4f} val_loss {val_loss:.4f} "
            losses += f"val_perplexity {perplexity:.1f}"
            print(f"epoch {epoch + 1} {losses} tokens/s {tokens_per_s:.0f}", flush=True)
        if step == last_step:
            break

    if args.checkpoint and rank == 0:
        torch.save(model.module.state_dict(), args.checkpoint)
    # Before its process group: torch 2.13 may wait for gloo's threads for ever if DDP outlives it.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
