"""The page at `/`: a chat and a view of the stack, plain files that send requests only to this gateway."""
