"""Names for an engine core's gRPC health check besides those of its services."""

LIVE = "live"
"""The process itself: SERVING while the engine loop makes passes, with or without workers."""
