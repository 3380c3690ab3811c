"""Endpoints of models that read: bodies of several APIs in, vectors and scores out."""
