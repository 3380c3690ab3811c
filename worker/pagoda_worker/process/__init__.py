"""The worker as a process: its links to the engine core, its loop, its start and its end."""
