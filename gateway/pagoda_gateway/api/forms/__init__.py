"""Structured output: the ways in which clients specify it, and the grammar that each of them becomes."""
