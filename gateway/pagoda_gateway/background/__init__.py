"""Responses that run though nobody waits: begun by one gateway, gone on with by any."""
