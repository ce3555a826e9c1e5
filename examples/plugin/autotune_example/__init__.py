"""Example extensions of autotune; docs/extending.md explains them."""
