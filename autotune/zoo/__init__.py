"""The models and clusters of AutoSync's evaluation, without measurements.

architectures.py: variables of the models; clusters.py: the clusters; assumed_models.py: op graphs
with assumed times (`assumed_ops`), with assumed_vision.py and assumed_device.py.
"""
