"""A checkpoint on disk: what it says of the model, and its matrices in whatever format."""
