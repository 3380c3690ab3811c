"""Drafting tokens ahead, and keeping only those that would have been sampled anyway."""
