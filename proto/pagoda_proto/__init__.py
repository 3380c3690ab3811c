"""What crosses the borders between processes."""
