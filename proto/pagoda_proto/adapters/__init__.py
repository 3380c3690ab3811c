"""Adapters, which all tiers identify by the digest of their files, read in the same way by gateway and worker."""
