"""A Flower app in PyTorch as a tutorial has it."""
