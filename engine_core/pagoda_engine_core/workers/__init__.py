"""Workers as this process sees them: who registered, who is alive, what was sent to them."""
