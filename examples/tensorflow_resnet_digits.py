"""Trains a small ResNet on scikit-learn's handwritten digits: a TensorFlow program for one device.

    python examples/tensorflow_resnet_digits.py --epochs 1
    autotune tune --workers 2 -- python examples/tensorflow_resnet_digits.py --epochs 1000

`autotune.distribute` is its only line about more than one device. It splits each batch between the
ranks that `autotune` starts.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings only

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import autotune

SPLIT_SEED = 0  # the held-out images are the same for every --seed


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ResNet on the digits data set, in TensorFlow.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step, of all ranks")
    parser.add_argument("--lr", type=float, default=0.03, help="peak rate; cosine decay to 0")
    parser.add_argument("--width", type=int, default=32, help="channels of the first stage")
    parser.add_argument("--image-size", type=int, default=32, help="pixels per side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-steps", type=int, default=0, help="0: no limit")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--checkpoint", type=Path, help="where the trained weights are saved")
    return parser.parse_args()


def residual_block(value: Any, channels: int, stride: int) -> Any:
    """Two 3x3 convolutions with a shortcut (He et al. 2016, Fig. 5 left)."""
    inner = layers.Conv2D(channels, 3, stride, padding="same", use_bias=False)(value)
    inner = layers.Activation("relu")(layers.BatchNormalization()(inner))
    inner = layers.Conv2D(channels, 3, padding="same", use_bias=False)(inner)
    if stride != 1 or value.shape[-1] != channels:
        value = layers.Conv2D(channels, 1, stride, use_bias=False)(value)
        value = layers.BatchNormalization()(value)
    return layers.Activation("relu")(layers.Add()([value, layers.BatchNormalization()(inner)]))


def resnet(width: int, image_size: int) -> keras.Model:
    """ResNet-18 for small one-channel images: four stages, `width` to 8 * `width` channels."""
    images = keras.Input((image_size, image_size, 1))
    value = layers.Conv2D(width, 3, padding="same", use_bias=False)(images)
    value = layers.Activation("relu")(layers.BatchNormalization()(value))
    for stage in range(4):
        for block in range(2):
            value = residual_block(value, width << stage, 2 if stage > 0 and block == 0 else 1)
    return keras.Model(images, layers.Dense(10)(layers.GlobalAveragePooling2D()(value)))


def load_data(image_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, size, size, 1), normalized, and their digits, in an order that is always one."""
    digits = load_digits()
    images = digits.images.astype("float32")[..., None]
    images = tf.image.resize((images - images.mean()) / images.std(), (image_size, image_size))
    order = np.random.default_rng(SPLIT_SEED).permutation(len(digits.target))
    return images.numpy()[order], digits.target.astype("int32")[order]


def main() -> None:
    args = parse_args()
    keras.utils.set_random_seed(args.seed)
    images, labels = load_data(args.image_size)
    held_out = len(labels) // 5
    train_images, train_labels = images[held_out:], labels[held_out:]
    steps_per_epoch = len(train_labels) // args.batch_size
    total_steps = args.epochs * steps_per_epoch
    if total_steps < 1:
        need = f"at least 1 epoch and --batch-size {args.batch_size} images"
        raise SystemExit(f"need {need}, but have {args.epochs} and {len(train_labels)}")
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps

    model = resnet(args.width, args.image_size)
    rate = keras.optimizers.schedules.CosineDecay(args.lr, total_steps)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=5e-4)
    optimizer.build(model.trainable_variables)
    print(f"{model.count_params() / 1e6:.2f} M parameters", flush=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    train_step = autotune.distribute(train_step)
    random = np.random.default_rng(args.seed)
    step = 0
    for epoch in range(args.epochs):
        started, first_step, loss_sum = time.perf_counter(), step, 0.0
        order = random.permutation(len(train_labels))
        for rows in np.split(order[: steps_per_epoch * args.batch_size], steps_per_epoch):
            loss = float(train_step(train_images[rows], train_labels[rows]))
            loss_sum += loss
            step += 1
            if step % args.log_every == 0:
                print(f"step {step}/{last_step} loss {loss:.4f}", flush=True)
            if step == last_step:
                break
        steps = step - first_step
        images_per_s = steps * args.batch_size / (time.perf_counter() - started)
        predicted = model.predict(images[:held_out], batch_size=64, verbose=0).argmax(1)
        accuracy = np.mean(predicted == labels[:held_out])
        print(
            f"epoch {epoch + 1} train_loss {loss_sum / steps:.4f} "
            f"val_accuracy {accuracy:.4f} images/s {images_per_s:.1f}",
            flush=True,
        )
        if step == last_step:
            break
    if args.checkpoint:
        model.save_weights(args.checkpoint)


if __name__ == "__main__":
    main()
