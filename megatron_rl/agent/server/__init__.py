"""The inference server: OpenAI's HTTP API, from request bodies to requests of an engine, and back."""
