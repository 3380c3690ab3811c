"""Tokens and blocks: which worker computes what, and whose tokens those are."""
