"""Between an agent's requests and the engine: the echo rule, recording, repeats. Knows dialects, and no HTTP framework."""
