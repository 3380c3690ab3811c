"""Which tokens a row's grammar allows: compiled once for all rows, then one matcher per row."""
