"""What makes gluefl fast: a thread pool, CUDA streams and graphs, Triton kernels, each behind a plain function.

The functions of this folder have a form that needs neither threads nor a GPU and gives the same bits. The kernels of
training layers (`kernels/`) agree with PyTorch's layers up to rounding. Nothing here knows what a client or a strategy
is.
"""
