"""API keys: who is calling, what the key allows, what is left of its limits, and what it has used."""
