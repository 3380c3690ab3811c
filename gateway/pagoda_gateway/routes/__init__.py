"""One module per family of endpoints: a request in, a response out."""
