"""Adapters of this worker's model: files that strangers wrote, judged before they are read, held by their digest."""
