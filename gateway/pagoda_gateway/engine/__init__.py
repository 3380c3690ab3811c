"""The engine core as the gateway sees it: one session, the requests open on it, resubmission."""
