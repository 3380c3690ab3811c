"""Endpoints about API keys: who may ask, and what each has used."""
