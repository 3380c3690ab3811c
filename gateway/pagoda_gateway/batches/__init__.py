"""The batch API: files, the batches made from them, and the work that answers their lines."""
