"""Trains neural collaborative filtering (NeuMF) on ratings: a TensorFlow program for one device.

    python examples/tensorflow_ncf_ratings.py --epochs 1
    autotune tune --workers 2 -- python examples/tensorflow_ncf_ratings.py --epochs 1000

`autotune.distribute` is its only line about more than one device. The ratings are generated: every
user and item has a random latent vector, and a user takes the items whose product with the user's,
popularity and noise are largest. The embeddings have sparse gradients (tf.IndexedSlices).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings only

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import autotune

DATA_SEED = 0  # the ratings are the same for every --seed
TASTES = 16  # latent dimensions of the generated ratings
TASTE_WEIGHT = 2.0  # standard deviation of a user's liking, without the noise of the choice (1.28)
POPULARITY_EXPONENT = 0.8  # the item of rank r is taken as if it were r^-0.8 as attractive
RIVALS = 99  # items against which the held-out one is ranked (He et al. 2017, sec. 4.1)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="NeuMF on generated ratings, in TensorFlow.")
    parser.add_argument("--users", type=int, default=4000)
    parser.add_argument("--items", type=int, default=3000)
    parser.add_argument("--ratings-per-user", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument(
        "--batch-size", type=int, default=512, help="ratings per step, of all ranks"
    )
    parser.add_argument("--negatives", type=int, default=3, help="items not taken, per rating")
    parser.add_argument("--width", type=int, default=64, help="size of an embedding")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=0, help="0: no limit")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--checkpoint", type=Path, help="where the trained weights are saved")
    return parser.parse_args()


def neumf(users: int, items: int, width: int) -> keras.Model:
    """GMF (a product of embeddings) and an MLP over other embeddings (He et al. 2017, Fig. 3)."""
    user, item = keras.Input((), dtype="int32"), keras.Input((), dtype="int32")

    def embedded(rows: int, ids: keras.KerasTensor) -> keras.KerasTensor:
        start = keras.initializers.RandomNormal(stddev=0.05)
        return layers.Embedding(rows, width, embeddings_initializer=start)(ids)

    product = layers.Multiply()([embedded(users, user), embedded(items, item)])
    mixed = layers.Concatenate()([embedded(users, user), embedded(items, item)])
    for size in (width, width // 2, width // 4):
        mixed = layers.Dense(size, activation="relu")(mixed)
    logits = layers.Dense(1)(layers.Concatenate()([product, mixed]))
    return keras.Model([user, item], layers.Reshape(())(logits))


def generate(users: int, items: int, ratings_per_user: int) -> tuple[np.ndarray, np.ndarray]:
    """Which items each user takes (users, items), and candidates (users, 1 + RIVALS).

    The first candidate is the held-out item of the user, the others were not taken.
    """
    if min(ratings_per_user, items - RIVALS - ratings_per_user) < 2 or users < 1:
        raise SystemExit(
            f"generated ratings need a user and {ratings_per_user + RIVALS + 2} items, "
            f"but there are to be {users} and {items}"
        )
    random = np.random.default_rng(DATA_SEED)
    liking = random.normal(size=(users, TASTES)) @ random.normal(size=(TASTES, items))
    popularity = -POPULARITY_EXPONENT * np.log(1 + random.permutation(items))
    noise = random.gumbel(size=(users, items))
    order = np.argsort(-(TASTE_WEIGHT * liking / TASTES**0.5 + popularity + noise), axis=1)
    taken = np.zeros((users, items), dtype=bool)
    np.put_along_axis(taken, order[:, :ratings_per_user], True, axis=1)
    column = random.integers(ratings_per_user, size=(users, 1))
    held_out = np.take_along_axis(order[:, :ratings_per_user], column, axis=1)
    rivals = random.permuted(order[:, ratings_per_user:], axis=1)[:, :RIVALS]
    return taken, np.concatenate([held_out, rivals], axis=1)


def draw_batch(
    pairs: np.ndarray, taken: np.ndarray, negatives: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Users, items and labels of ratings (batch, 2), with `negatives` untaken items for each."""
    users, items = np.repeat(pairs, 1 + negatives, axis=0).T.copy()
    wrong = np.arange(len(users)) % (1 + negatives) > 0
    labels = (~wrong).astype("float32")
    while wrong.any():
        items[wrong] = random.integers(taken.shape[1], size=wrong.sum())
        wrong &= taken[users, items]
    return users.astype("int32"), items.astype("int32"), labels


def hit_rate(model: keras.Model, candidates: np.ndarray) -> float:
    """Share of users whose held-out item is among the ten best of their candidates."""
    users = np.repeat(np.arange(len(candidates), dtype="int32"), candidates.shape[1])
    inputs = [users, candidates.ravel().astype("int32")]
    scores = model.predict(inputs, batch_size=1 << 15, verbose=0).reshape(candidates.shape)
    return float(np.mean((scores[:, 1:] >= scores[:, :1]).sum(1) < 10))


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(args.seed)
    taken, candidates = generate(args.users, args.items, args.ratings_per_user)
    training = taken.copy()
    np.put_along_axis(training, candidates[:, :1], False, axis=1)
    pairs = np.argwhere(training)
    steps_per_epoch = len(pairs) // args.batch_size
    total_steps = args.epochs * steps_per_epoch
    if total_steps < 1:
        need = f"at least 1 epoch and --batch-size {args.batch_size} ratings"
        raise SystemExit(f"need {need}, but have {args.epochs} and {len(pairs)}")
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps

    model = neumf(args.users, args.items, args.width)
    optimizer = keras.optimizers.Adagrad(args.lr)
    optimizer.build(model.trainable_variables)
    print(f"{model.count_params() / 1e6:.2f} M parameters, {len(pairs)} ratings", flush=True)

    @tf.function
    def train_step(users: tf.Tensor, items: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model([users, items], training=True)
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    train_step = autotune.distribute(train_step)
    random = np.random.default_rng(args.seed)
    step = 0
    for epoch in range(args.epochs):
        started, first_step, loss_sum = time.perf_counter(), step, 0.0
        order = random.permutation(len(pairs))
        for rows in np.split(order[: steps_per_epoch * args.batch_size], steps_per_epoch):
            loss = float(train_step(*draw_batch(pairs[rows], taken, args.negatives, random)))
            loss_sum += loss
            step += 1
            if step % args.log_every == 0:
                print(f"step {step}/{last_step} loss {loss:.4f}", flush=True)
            if step == last_step:
                break
        steps = step - first_step
        ratings_per_s = steps * args.batch_size / (time.perf_counter() - started)
        print(
            f"epoch {epoch + 1} train_loss {loss_sum / steps:.4f} "
            f"hit_rate_10 {hit_rate(model, candidates):.4f} ratings/s {ratings_per_s:.0f}",
            flush=True,
        )
        if step == last_step:
            break
    if args.checkpoint:
        model.save_weights(args.checkpoint)


if __name__ == "__main__":
    main()
