"""`make serve`: a model behind an OpenAI-compatible API; requests that come together are answered together."""
