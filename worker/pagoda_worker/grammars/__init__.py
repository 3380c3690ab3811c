"""What tokens a row's grammar leaves it: compiled once for all rows, then a matcher per row."""
