"""From hidden states of a prompt to what was asked of it: vectors and scores, as the model's files say."""
