"""Hand-made strategies: the field's defaults, as baselines and as the tuner's first proposals.

Each builder is a pure function of the workload and the cluster. "In order" means gradient-ready
order, the order of `Workload.variables`. `registry.BUILDERS` holds them all by name.
"""
