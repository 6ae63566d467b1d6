"""The front: OpenAI-compatible HTTP in, tokens of workers out. It owns the request."""
