"""What makes gluefl fast: a thread pool, CUDA streams and graphs, Triton kernels, each behind a plain function.

The functions of this folder have a form that needs neither threads nor a GPU and gives the same bits, except rotations
and training layers, which agree up to rounding. Nothing here depends on a strategy.
"""
