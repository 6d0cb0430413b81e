"""What makes it fast: threads, streams, graphs and kernels, behind plain functions."""
