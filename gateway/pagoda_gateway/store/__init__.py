"""Everything that outlives a request or a process: records, logs and claims, in one of two back ends."""
