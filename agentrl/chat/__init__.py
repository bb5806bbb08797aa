"""Chat: messages to token ids and sampled ids back to messages."""
