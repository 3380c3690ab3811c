"""Guessing tokens ahead, and keeping only those that would have been chosen anyway."""
