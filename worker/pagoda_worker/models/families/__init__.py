"""Families of decoders as data: what config.json of each says, and what each calls its tensors."""
