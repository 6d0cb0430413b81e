"""A Flower app with a network of five million weights."""
