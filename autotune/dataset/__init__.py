"""Datasets of real trials: reads and writes the folders that `datasets/collect.py` fills.

from autotune.dataset.folder import read_dataset
for domain in read_dataset(Path("datasets/trials")):
    ...
"""
