"""The researcher: turns a topic into a frozen plan, runs it on swarm servers, and reports what can be recomputed."""
