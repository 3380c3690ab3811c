"""Requests to models that pool a prompt, and how to recognise these models."""
