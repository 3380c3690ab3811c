"""How an API asks and how it is answered: bodies to jobs, and what comes of a job to JSON and events."""
