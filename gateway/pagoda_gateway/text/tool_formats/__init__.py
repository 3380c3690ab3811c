"""How model families write tool calls: data over a few shapes, each of which parses calls and states grammar rules."""
