"""A Flower app in PyTorch that reads handwriting."""
