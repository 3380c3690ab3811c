"""What output must look like, in the ways that clients say it, and the grammar that each one comes to."""
