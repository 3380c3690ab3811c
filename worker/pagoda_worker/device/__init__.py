"""What a worker needs from a device besides computing: memory, copies, streams."""
