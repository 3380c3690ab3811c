"""Endpoints about API keys: managing them, and reporting their usage."""
