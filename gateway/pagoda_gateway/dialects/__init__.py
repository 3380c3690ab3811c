"""One API per module: its request bodies to jobs, and the updates of a job to its JSON and events."""
