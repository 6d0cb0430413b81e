"""A Flower app without training."""
