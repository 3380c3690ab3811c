"""HTTP and text: OpenAI's API in front of an engine core."""
