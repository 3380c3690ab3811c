"""Text to tokens and back: tokenizer, templates, stop strings, tool calls. No server needed."""
