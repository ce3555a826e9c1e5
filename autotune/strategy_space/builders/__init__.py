"""Hand-made strategies: the defaults of the field, as baselines and as the tuner's first proposals.

Every builder is a pure function of the workload and the cluster. "In order" means gradient-ready order, the
order of `Workload.variables`. `registry.BUILDERS` has them all by name.
"""
