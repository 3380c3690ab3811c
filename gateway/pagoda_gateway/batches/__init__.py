"""What is asked by file: files, the batches made of them, and the work that answers their lines."""
