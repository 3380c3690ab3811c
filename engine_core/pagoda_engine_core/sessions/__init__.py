"""The gRPC side: sessions of gateways, output on its way to them, and operators' queries."""
