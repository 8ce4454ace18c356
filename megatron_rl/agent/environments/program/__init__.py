"""Programs that speak OpenAI's API, or coroutines with a client of it, trained as they are."""
