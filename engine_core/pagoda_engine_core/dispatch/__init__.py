"""From a session to a worker: admission, what waits, which worker gets it, and the way back."""
