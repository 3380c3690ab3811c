"""An httpx transport that makes streams outlive the gateway they came from; needs httpx and no other tier."""
