"""Whether a client's grammar can be compiled, found out by a process that may take no more than so much for it."""
