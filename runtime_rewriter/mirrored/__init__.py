"""Executes a plan in a script of `tf.distribute.MultiWorkerMirroredStrategy`."""
