"""Connects an agent's requests to the engine: token reuse, recording, retries. Knows API dialects, but no HTTP framework."""
