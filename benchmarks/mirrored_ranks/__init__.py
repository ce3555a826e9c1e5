"""Workers of MultiWorkerMirroredStrategy in a testbed, with emulated accelerators."""
