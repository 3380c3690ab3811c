"""From hidden states of a prompt to the requested vectors and scores, as the model's files specify."""
