"""Responses that run without a waiting client: begun by one gateway, continued by any."""
