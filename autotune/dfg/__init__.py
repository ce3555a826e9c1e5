"""The global data-flow graph and its one replay: flat arrays in, a timeline out. Nothing else in the product simulates time."""
