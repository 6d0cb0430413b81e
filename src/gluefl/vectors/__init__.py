"""A model as flat vectors: its layout, masks, sparse parts, top-k."""
