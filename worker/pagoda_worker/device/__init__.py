"""What a device is asked besides computing: memory, copies, streams."""
