"""Workers as this process sees them: registration, liveness, sockets, steps in flight."""
