"""Adapters as every tier knows them: by the digest of their files, which gateway and worker read alike."""
