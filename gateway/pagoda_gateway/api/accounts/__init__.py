"""Schemas about API keys and their usage, for operators, and for clients about their own key."""
