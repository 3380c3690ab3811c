"""Requests that a client may repeat, because it gave them a key: their answer is resumed, joined or replayed."""
