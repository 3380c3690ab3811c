"""What outlives a request and a process: records, logs, claims and counters, in one of two back ends."""
