"""Families of decoders as data: the fields of their config.json, and the names of their tensors."""
