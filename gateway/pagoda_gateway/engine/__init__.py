"""Engine cores as the gateway sees them: a session with each, the requests open on it, resubmission."""
