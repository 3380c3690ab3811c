"""Adapters of this worker's model: untrusted files, checked before they are read, identified by their digest."""
