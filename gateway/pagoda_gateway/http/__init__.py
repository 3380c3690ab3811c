"""Bytes before and after a request: connections, limits, memory, turns of clients, event streams."""
