"""What stands between a conversation and tokens, for whoever answers: the gateway, and `LLM`."""
