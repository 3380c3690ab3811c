"""One module per family of endpoints: its paths, and the shape of its answers."""
