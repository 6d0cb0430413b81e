"""Layers of many clients at once, for a GPU: every client has weights of its own, one kernel computes them all.

Activations are (clients, batch, height, width, channels): the channels of a pixel lie side by side, so that a product
with a client's weights is a plain matrix product and nothing is ever transposed. Weights are rows of one matrix of
all clients and are read where they lie. Nothing is added up in an order that could change: two runs give the same
bits.
"""
