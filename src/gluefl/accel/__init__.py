"""What makes gluefl fast: a thread pool, CUDA streams and graphs, Triton kernels, each behind a plain function.

Every function has a form that needs neither threads nor a GPU and gives the same bits. Nothing here knows what a
client or a strategy is.
"""
