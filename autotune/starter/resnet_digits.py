"""Trains a small ResNet on scikit-learn's handwritten digits with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/resnet_digits.py
    python examples/resnet_digits.py --epochs 1

The images are the 1797 scans (8x8) of the UCI digits set, enlarged to --image-size. A fifth of
them is held out.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

SPLIT_SEED = 0  # the held-out images are the same for every --seed


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet on the digits data set, data-parallel.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank and step")
    parser.add_argument(
        "--lr", type=float, default=0.03, help="peak learning rate; cosine decay to 0"
    )
    parser.add_argument(
        "--width", type=int, default=32, help="channels of the first stage (32: 2.8 M parameters)"
    )
    parser.add_argument(
        "--image-size", type=int, default=32, help="pixels per side after enlarging the 8x8 scans"
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


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al. 2016, Fig. 5 left)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 for small one-channel images: four stages, `width` to 8 * `width` channels."""

    def __init__(self, width: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks: list[nn.Module] = []
        channels = width
        for stage in range(4):
            for block in range(2):
                blocks.append(
                    BasicBlock(channels, width << stage, 2 if stage > 0 and block == 0 else 1)
                )
                channels = width << stage
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (batch, classes) of images (batch, 1, side, side)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def load_data(image_size: int) -> tuple[Subset[tuple[Tensor, ...]], Subset[tuple[Tensor, ...]]]:
    """Training and validation images (1, image_size, image_size), normalized, with their digit."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    images = F.interpolate(
        (images - images.mean()) / images.std(),
        size=image_size,
        mode="bilinear",
        align_corners=False,
    )
    dataset = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(
        len(dataset), generator=torch.Generator().manual_seed(SPLIT_SEED)
    ).tolist()
    held_out = len(dataset) // 5
    return Subset(dataset, order[held_out:]), Subset(dataset, order[:held_out])


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
    model: nn.Module, loader: DataLoader[tuple[Tensor, ...]], device: torch.device
) -> float:
    """Share of the held-out images that are classified right, over all ranks."""
    model.eval()
    counts = torch.zeros(2, device=device)  # right, seen
    for images, labels in loader:
        predicted = model(images.to(device)).argmax(1)
        counts += torch.stack(
            [(predicted == labels.to(device)).sum(), torch.tensor(len(labels), device=device)]
        )
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    args = parse_args()
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    train_set, val_set = load_data(args.image_size)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)
    val_loader = DataLoader(Subset(val_set, range(rank, len(val_set), world_size)), batch_size=64)

    model = ResNet(args.width).to(device)
    if rank == 0:
        million_parameters = sum(p.numel() for p in model.parameters()) / 1e6
        print(
            f"{million_parameters:.2f} M parameters, {world_size} rank(s) on {device.type}",
            flush=True,
        )
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    total_steps = args.epochs * len(train_loader)
    if total_steps < 1:
        need = f"at least 1 epoch and --batch-size {args.batch_size} images"
        raise SystemExit(
            f"a rank needs {need}, but has {args.epochs} epochs and {len(sampler)} images"
        )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_steps)
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        started, first_step, loss_sum = time.perf_counter(), step, torch.zeros((), device=device)
        for images, labels in train_loader:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
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
        dist.all_reduce(loss_sum)
        train_loss = loss_sum.item() / (steps * world_size)
        images_per_s = steps * args.batch_size * world_size / (time.perf_counter() - started)
        accuracy = evaluate(model.module, val_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1} train_loss {train_loss:.4f} "
                f"val_accuracy {accuracy:.4f} images/s {images_per_s:.1f}",
                flush=True,
            )
        if step == last_step:
            break

    if args.checkpoint and rank == 0:
        torch.save(model.module.state_dict(), args.checkpoint)
    # Before its process group: torch 2.13 may wait for gloo's threads for ever if DDP outlives it.
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
