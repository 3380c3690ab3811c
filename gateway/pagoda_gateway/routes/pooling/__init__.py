"""Endpoints of embedding and scoring models: bodies of several APIs in, vectors and scores out."""
