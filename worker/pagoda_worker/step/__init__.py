"""One step: a plan comes in, rows are computed, their tokens go out."""
