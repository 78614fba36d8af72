"""An LLM behind an OpenAI-compatible endpoint: its settings, its budget, and a record of every call."""
