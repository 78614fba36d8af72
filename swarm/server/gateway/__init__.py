"""Sits between an agent's requests and the engine: token reuse, recording, retries. Knows dialects, but no HTTP framework."""
