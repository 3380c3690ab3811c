"""What an engine core's gRPC health is asked by, beside the names of its services."""

LIVE = "live"
"""The process itself: SERVING while the loop comes round, whether workers are there or not."""
