"""The gRPC side: gateways' sessions, what is on its way to them, and what an operator asks."""
