"""Models that read a text in both directions at once: families as data, and the encoder that runs them all."""
