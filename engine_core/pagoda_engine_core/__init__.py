"""Tokens and blocks: which worker computes what, and to whom its tokens go."""
