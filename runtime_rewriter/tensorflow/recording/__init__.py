"""Records steps of a TensorFlow graph: RunMetadata becomes the files of a recording."""
