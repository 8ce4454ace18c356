"""The inference server: what OpenAI's clients ask over HTTP, from its bytes to requests of an engine and back."""
