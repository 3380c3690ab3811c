"""Rows on the host: their tokens, penalties and drafts, and the batch built from them."""
