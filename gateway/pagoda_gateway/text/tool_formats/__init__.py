"""How families of models write tool calls: data over a few shapes, each of which reads calls and says them as rules."""
