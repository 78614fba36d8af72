"""The strategist that asks an LLM: its prompt, its look-ups, and what it may spend."""
