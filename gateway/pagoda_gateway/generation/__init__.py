"""A generation from body to answer, whatever endpoint asked for it."""
