"""A checkpoint on disk: what it says about the model, and its matrices in whatever format."""
