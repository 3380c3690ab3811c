"""From logits to a token and its log-probabilities, in one order that nothing else can change."""
