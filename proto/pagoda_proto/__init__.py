"""Everything that crosses the borders between processes."""
