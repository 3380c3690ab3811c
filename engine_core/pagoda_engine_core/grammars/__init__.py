"""Whether a client's grammar compiles, tested in a process with limited time and memory."""
