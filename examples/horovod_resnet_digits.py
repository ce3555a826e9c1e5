"""Trains the ResNet of `resnet_digits.py` as a Horovod script.

    horovodrun -np 2 python examples/horovod_resnet_digits.py
    python examples/horovod_resnet_digits.py --epochs 1

`make horovod` builds Horovod.
"""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F  # noqa: N812
from resnet_digits import ResNet, load_data, parse_args
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[tuple[Tensor, ...]]) -> float:
    """Share of the held-out images that are classified right, over all ranks."""
    model.eval()
    counts = torch.zeros(2)  # right, seen
    for images, labels in loader:
        right = (model(images).argmax(1) == labels).sum()
        counts += torch.stack([right, torch.tensor(len(labels))])
    counts = hvd.allreduce(counts, name="counts", op=hvd.Sum)
    return float(counts[0] / counts[1])


def main() -> None:
    args = parse_args()
    hvd.init()
    rank, world_size = hvd.rank(), hvd.size()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)

    train_set, val_set = load_data(args.image_size)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        train_set, world_size, rank, seed=args.seed, drop_last=True
    )
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=64)

    model = ResNet(args.width)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4),
        named_parameters=model.named_parameters(),
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    total_steps = args.epochs * len(train_loader)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        started, first_step, loss_sum = time.perf_counter(), step, torch.zeros(())
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            step += 1
            loss_sum += loss.detach()
            if rank == 0 and step % args.log_every == 0:
                print(f"step {step}/{last_step} loss {loss.item():.4f}", flush=True)
            if step == last_step:
                break
        steps = step - first_step
        train_loss = float(hvd.allreduce(loss_sum, name="loss")) / steps
        images_per_s = steps * args.batch_size * world_size / (time.perf_counter() - started)
        accuracy = evaluate(model, val_loader)
        if rank == 0:
            print(
                f"epoch {epoch + 1} train_loss {train_loss:.4f} "
                f"val_accuracy {accuracy:.4f} images/s {images_per_s:.1f}",
                flush=True,
            )
        if step == last_step:
            break

    if args.checkpoint and rank == 0:
        torch.save(model.state_dict(), args.checkpoint)


if __name__ == "__main__":
    main()
