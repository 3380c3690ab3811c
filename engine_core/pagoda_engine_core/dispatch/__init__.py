"""From a session to a worker and back: admission, queueing, routing, answers."""
