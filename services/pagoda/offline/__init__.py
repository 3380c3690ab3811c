"""A model in this process, without servers: `LLM`, `AsyncLLM`, and what they return."""
