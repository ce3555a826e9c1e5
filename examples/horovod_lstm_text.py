"""Trains the LSTM of `lstm_text.py` as a Horovod script.

    horovodrun -np 2 python examples/horovod_lstm_text.py
    python examples/horovod_lstm_text.py --epochs 1

Gradients are accumulated over --accumulate batches (`backward_passes_per_step`). Their averages
are clipped between `synchronize()` and `step()`. `make horovod` builds Horovod.
"""

from __future__ import annotations

import math
import time

import horovod.torch as hvd
import torch
from lstm_text import LanguageModel, load_data, loss_of, make_optimizer, parse_args
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Mean negative log-likelihood per held-out byte in nats, over all ranks."""
    model.eval()
    sums = torch.zeros(2)  # nats, bytes
    for (sequences,) in loader:
        nats = loss_of(model, sequences, "sum")
        sums += torch.stack([nats, torch.tensor(float(sequences[:, 1:].numel()))])
    sums = hvd.allreduce(sums, name="sums", op=hvd.Sum)
    return float(sums[0] / sums[1])


def main() -> None:
    args = parse_args()
    hvd.init()
    rank, world_size = hvd.rank(), hvd.size()
    torch.set_num_threads(1)

    train_set, val_set = load_data(args.text, args.block_size)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    batch = args.batch_size * args.accumulate
    train_loader = DataLoader(train_set, batch, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=64)

    torch.manual_seed(args.seed)
    model = LanguageModel(args.width, args.layers, args.dropout)
    torch.manual_seed(args.seed + rank)  # every rank drops other units
    optimizer = hvd.DistributedOptimizer(
        make_optimizer(model, args.lr, args.weight_decay),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=args.accumulate,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    total_steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps, pct_start=0.1, cycle_momentum=False
    )
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        started, first_step, loss_sum = time.perf_counter(), step, torch.zeros(())
        for (sequences,) in train_loader:
            optimizer.zero_grad()
            loss = torch.zeros(())
            for part in sequences.split(args.batch_size):
                share = loss_of(model, part) / args.accumulate
                share.backward()
                loss += share.detach()
            optimizer.synchronize()
            if args.clip_grad_norm > 0:
                nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            with optimizer.skip_synchronize():
                optimizer.step()
            scheduler.step()
            step += 1
            loss_sum += loss
            if rank == 0 and step % args.log_every == 0:
                print(f"step {step}/{last_step} loss {loss.item():.4f}", flush=True)
            if step == last_step:
                break
        steps = step - first_step
        train_loss = float(hvd.allreduce(loss_sum, name="loss")) / steps
        trained = steps * batch * args.block_size * world_size
        bytes_per_s = trained / (time.perf_counter() - started)
        val_loss = evaluate(model, val_loader)
        if rank == 0:
            losses = f"train_loss {train_loss:.4f} val_loss {val_loss:.4f} "
            losses += f"val_perplexity {math.exp(val_loss):.2f}"
            print(f"epoch {epoch + 1} {losses} bytes/s {bytes_per_s:.0f}", flush=True)
        if step == last_step:
            break

    if args.checkpoint and rank == 0:
        torch.save(model.state_dict(), args.checkpoint)


if __name__ == "__main__":
    main()
