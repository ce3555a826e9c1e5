"""Ready-made specs: the models (`architectures`) and clusters (`clusters`) that AutoSync was evaluated on, without any measurement."""
