"""Runs a job from the request to its last update, for every API. Needs no HTTP server."""
