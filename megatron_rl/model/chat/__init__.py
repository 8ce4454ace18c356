"""Conversations: messages to tokens, tokens to messages, and the next prompt without encoding the model's tokens
again."""
