"""Trains the ResNet of `tensorflow_resnet_digits.py` as a Horovod script.

    horovodrun -np 2 python examples/horovod_tensorflow_resnet_digits.py
    autotune tune -- horovodrun -np 2 python examples/horovod_tensorflow_resnet_digits.py

`make horovod` builds Horovod. `--batch-size` counts the images of one rank.
"""

from __future__ import annotations

import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow_resnet_digits import load_data, parse_args, resnet


def main() -> None:
    args = parse_args()
    hvd.init()
    keras.utils.set_random_seed(args.seed)
    images, labels = load_data(args.image_size)
    held_out = len(labels) // 5
    train_images = images[held_out:][hvd.rank() :: hvd.size()]
    train_labels = labels[held_out:][hvd.rank() :: hvd.size()]
    steps_per_epoch = (len(labels) - held_out) // hvd.size() // args.batch_size
    total_steps = args.epochs * steps_per_epoch
    last_step = min(total_steps, args.max_steps) if args.max_steps else total_steps

    model = resnet(args.width, args.image_size)
    rate = keras.optimizers.schedules.CosineDecay(args.lr, total_steps)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9, weight_decay=5e-4)
    optimizer.build(model.trainable_variables)
    # Horovod takes the variables of TensorFlow inside those of Keras.
    variables = [variable.value for variable in model.trainable_variables]
    hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape)
        optimizer.apply(tape.gradient(loss, variables), model.trainable_variables)
        return loss

    random = np.random.default_rng(args.seed)
    step = 0
    for epoch in range(args.epochs):
        started, first_step, loss_sum = time.perf_counter(), step, 0.0
        order = random.permutation(len(train_labels))[: steps_per_epoch * args.batch_size]
        for rows in np.split(order, steps_per_epoch):
            loss = float(
                train_step(tf.constant(train_images[rows]), tf.constant(train_labels[rows]))
            )
            loss_sum += loss
            step += 1
            if hvd.rank() == 0 and step % args.log_every == 0:
                print(f"step {step}/{last_step} loss {loss:.4f}", flush=True)
            if step == last_step:
                break
        steps = step - first_step
        train_loss = float(hvd.allreduce(tf.constant(loss_sum / steps), name="loss"))
        images_per_s = steps * args.batch_size * hvd.size() / (time.perf_counter() - started)
        logits = np.concatenate(
            [model(part, training=False) for part in np.array_split(images[:held_out], 8)]
        )
        if hvd.rank() == 0:
            accuracy = float((logits.argmax(1) == labels[:held_out]).mean())
            print(
                f"epoch {epoch + 1} train_loss {train_loss:.4f} "
                f"val_accuracy {accuracy:.4f} images/s {images_per_s:.1f}",
                flush=True,
            )
        if step == last_step:
            break

    if args.checkpoint and hvd.rank() == 0:
        model.save_weights(args.checkpoint)


if __name__ == "__main__":
    main()
