"""Structural tags: how clients write them down, and the grammar that each one comes to."""
