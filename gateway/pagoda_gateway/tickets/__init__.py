"""Requests whose client may ask again, as it has given them a key: their answer is resumed, joined or repeated."""
