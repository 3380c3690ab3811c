"""Resolves each option's value from flag, environment, file or default, and records its source."""
