"""Tensors: a model, its KV cache, and the steps of an engine core."""
