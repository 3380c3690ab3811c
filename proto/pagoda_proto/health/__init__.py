"""How observers that cannot query a process find out whether it is healthy."""
