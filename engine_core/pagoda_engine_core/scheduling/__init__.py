"""What a worker computes next: pure accounting of rows, tokens and blocks, with no clock and no I/O."""
