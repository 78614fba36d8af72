"""Between an agent's requests and the engine: token reuse, recording, retries. Knows dialects, and no HTTP framework."""
