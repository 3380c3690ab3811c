"""What a worker computes next: pure books of rows, tokens and blocks, with no clock and no I/O."""
