"""Trains neural collaborative filtering (NeuMF) on implicit feedback with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/ncf_ratings.py
    python examples/ncf_ratings.py --epochs 1

The data is generated, not collected. Every user and item has a random latent vector, and an item's
popularity falls as a power of its rank. A user takes the items with the largest sum of both and of
noise (`generate`); one item per user is held out. The embeddings have sparse gradients, since a
step touches only the rows of its batch, and their own optimizer.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DATA_SEED = 0  # the ratings are the same for every --seed
TASTES = 16  # latent dimensions of the generated ratings
TASTE_WEIGHT = 2.0  # standard deviation of a user's liking, without the noise of the choice (1.28)
POPULARITY_EXPONENT = (
    0.8  # the item of popularity rank r is taken as if it were r^-0.8 as attractive
)
RIVALS = 99  # items against which the held-out one is ranked (He et al. 2017, sec. 4.1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Neural collaborative filtering on generated ratings, data-parallel."
    )
    parser.add_argument("--users", type=int, default=4000)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument(
        "--ratings-per-user", type=int, default=40, help="mean over the users; at least 5 each"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size",
        type=int,
        default=256,
        help="ratings per rank and step, each with its negatives",
    )
    parser.add_argument(
        "--negatives",
        type=int,
        default=4,
        help="items not rated by the user, drawn for each rating",
    )
    parser.add_argument("--width", type=int, default=64, help="size of an embedding")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-steps", type=int, default=0, help="stop after this many steps; 0: no limit"
    )
    parser.add_argument(
        "--log-every", type=int, default=10, help="steps between two lines of output"
    )
    parser.add_argument("--checkpoint", type=Path, help="where rank 0 saves the trained weights")
    return parser.parse_args()


class NeuMF(nn.Module):
    """GMF (a product of embeddings) and an MLP over other embeddings (He et al. 2017, Fig. 3).

    One table holds all embeddings: a row per user, then one per item, with GMF's columns before
    MLP's. A step therefore sends one sparse tensor; several at once over gloo corrupt the heap in
    torch 2.13. `sparse`: whether the gradient of the table is sparse.
    """

    def __init__(self, users: int, items: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.users = users
        self.table = nn.Embedding(users + items, 2 * width, sparse=sparse)
        layers: list[nn.Module] = []
        for size in (2 * width, width, width // 2):
            layers += [nn.Linear(size, size // 2), nn.ReLU()]
        self.mlp = nn.Sequential(*layers)
        self.head = nn.Linear(width + width // 4, 1)
        nn.init.normal_(self.table.weight, std=0.05)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits (batch,) of users (batch,) taking items (batch,)."""
        rows = self.table(torch.stack([users, items + self.users]))
        (user_gmf, user_mlp), (item_gmf, item_mlp) = (row.chunk(2, 1) for row in rows)
        mixed = self.mlp(torch.cat([user_mlp, item_mlp], 1))
        logits: Tensor = self.head(torch.cat([user_gmf * item_gmf, mixed], 1)).squeeze(1)
        return logits


@dataclass(frozen=True)
class Ratings:
    """Generated feedback.

    `taken` (users, items): the items of each user, with the held-out one. `pairs` (ratings, 2):
    users and items to train on. `candidates` (users, 1 + RIVALS): the held-out item, then items
    that the user did not take.
    """

    taken: Tensor
    pairs: Tensor
    candidates: Tensor


def generate(users: int, items: int, ratings_per_user: int) -> Ratings:
    """Ratings of a latent-factor model: user u takes the n_u items with the largest of

        w <p_u, q_i> / sqrt(k) - a log(rank of i) + Gumbel noise

    which is n_u draws without replacement by softmax. p_u and q_i are standard normal in k = TASTES
    dimensions, w is TASTE_WEIGHT, a is POPULARITY_EXPONENT. n_u is 5 plus an exponentially
    distributed number: most users rate little, some a lot.
    """
    if min(ratings_per_user - 5, items - RIVALS - 5) < 1 or users < 1:
        need = f"at least 1 user, {RIVALS + 6} items and a mean of 6 ratings per user"
        raise SystemExit(
            f"generated ratings need {need}, "
            f"but there are to be {users}, {items} and {ratings_per_user}"
        )
    generator = torch.Generator().manual_seed(DATA_SEED)
    tastes, traits = (
        torch.randn(users, TASTES, generator=generator),
        torch.randn(items, TASTES, generator=generator),
    )
    popularity = -POPULARITY_EXPONENT * torch.randperm(items, generator=generator).add(1).log()
    noise = -torch.empty(users, items).exponential_(generator=generator).log()
    attraction = TASTE_WEIGHT * tastes @ traits.T / TASTES**0.5 + popularity + noise
    counts = (
        5 + torch.empty(users).exponential_(1 / (ratings_per_user - 5), generator=generator).long()
    )
    order = attraction.argsort(1, descending=True)
    chosen = torch.arange(items) < counts.clamp(max=items - RIVALS).unsqueeze(1)
    taken = torch.zeros(users, items, dtype=torch.bool).scatter_(1, order, chosen)
    held_out = torch.multinomial(taken.float(), 1, generator=generator)
    rivals = torch.multinomial((~taken).float(), RIVALS, generator=generator)
    return Ratings(
        taken, taken.scatter(1, held_out, False).nonzero(), torch.cat([held_out, rivals], 1)
    )


def draw_batch(pairs: Tensor, taken: Tensor, negatives: int) -> tuple[Tensor, Tensor, Tensor]:
    """Users, items, labels of ratings (batch, 2), with `negatives` untaken items for each."""
    users, items = pairs.repeat(1 + negatives, 1).unbind(1)
    wrong = torch.arange(len(users)) >= len(pairs)
    labels = (~wrong).float()
    while wrong.any():
        items = torch.where(wrong, torch.randint(taken.shape[1], items.shape), items)
        wrong &= taken[users, items]
    return users, items, labels


def make_optimizers(model: NeuMF, lr: float) -> list[torch.optim.Optimizer]:
    """Adam for the layers; lazy Adam, which touches only rows with a gradient, for the table."""
    layers = [*model.mlp.parameters(), *model.head.parameters()]
    lazy = torch.optim.SparseAdam if model.table.sparse else torch.optim.Adam
    return [lazy([model.table.weight], lr=lr), torch.optim.Adam(layers, lr=lr)]


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


def is_hit(scores: Tensor) -> Tensor:
    """Whether the first score of each row (users, 1 + RIVALS) is in its top ten; ties lose."""
    return (scores[:, 1:] >= scores[:, :1]).sum(1) < 10


@torch.no_grad()
def evaluate(model: nn.Module, candidates: Tensor, device: torch.device) -> float:
    """Share of users, over all ranks, whose held-out item is among its ten best candidates."""
    model.eval()
    counts = torch.zeros(2, device=device)  # hits, users
    for users in torch.arange(dist.get_rank(), len(candidates), dist.get_world_size()).split(256):
        items = candidates[users].to(device)
        scores = model(
            users.to(device).unsqueeze(1).expand_as(items).flatten(), items.flatten()
        ).view_as(items)
        counts += torch.stack([is_hit(scores).sum(), torch.tensor(len(users), device=device)])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def main() -> None:
    args = parse_args()
    device = setup()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    ratings = generate(args.users, args.items, args.ratings_per_user)
    train_set = TensorDataset(ratings.pairs)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    sparse = (
        dist.get_backend() == "gloo"
    )  # NCCL has no all-reduce of sparse tensors, so there the gradients are dense
    model = NeuMF(args.users, args.items, args.width, sparse).to(device)
    torch.manual_seed(args.seed + rank)  # every rank draws other negatives
    optimizers = make_optimizers(model, args.lr)
    model = DDP(model, device_ids=[device.index] if device.type == "cuda" else None)
    total_steps = args.epochs * len(train_loader)
    if total_steps < 1:
        need = f"at least 1 epoch and --batch-size {args.batch_size} ratings"
        raise SystemExit(
            f"a rank needs {need}, but has {args.epochs} epochs and {len(sampler)} ratings"
        )
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps
    before, popular = (
        evaluate(model.module, ratings.candidates, device),
        ratings.taken.sum(0)[ratings.candidates],
    )
    if rank == 0:
        million_parameters = sum(p.numel() for p in model.parameters()) / 1e6
        print(
            f"{million_parameters:.2f} M parameters, {world_size} rank(s) on {device.type}",
            flush=True,
        )
        about = f"{len(train_set)} ratings, {len(train_set) / ratings.taken.numel():.2%} of all"
        by_popularity = is_hit(popular).float().mean()
        hits = f"hit_rate_10 untrained {before:.4f}, by popularity {by_popularity:.4f}"
        print(f"{about}; {hits}", flush=True)

    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        started, first_step, loss_sum = time.perf_counter(), step, torch.zeros((), device=device)
        for (pairs,) in train_loader:
            users, items, labels = draw_batch(pairs, ratings.taken, args.negatives)
            loss = F.binary_cross_entropy_with_logits(
                model(users.to(device), items.to(device)), labels.to(device)
            )
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            step += 1
            loss_sum += loss.detach()
            if rank == 0 and step % args.log_every == 0:
                print(f"step {step}/{last_step} loss {loss.item():.4f}", flush=True)
            if step == last_step:
                break
        steps = step - first_step
        dist.all_reduce(loss_sum)
        train_loss = loss_sum.item() / (steps * world_size)
        ratings_per_s = steps * args.batch_size * world_size / (time.perf_counter() - started)
        hit_rate = evaluate(model.module, ratings.candidates, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1} train_loss {train_loss:.4f} hit_rate_10 {hit_rate:.4f} "
                f"ratings/s {ratings_per_s:.0f}",
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
