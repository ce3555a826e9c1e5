"""Ranks of Horovod inside the hosts of a testbed, with emulated accelerators."""
