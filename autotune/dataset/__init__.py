"""Datasets of real trials: the nouns, and a reader and a writer of the folders that `datasets/collect.py` fills.

from autotune.dataset.folder import read_dataset
for domain in read_dataset(Path("datasets/trials")):
    ...
"""
