"""What is said of API keys and of what they used: by operators, and by clients about their own."""
