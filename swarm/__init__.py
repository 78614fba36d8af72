"""The swarm: servers that host and train models, and clients whose agents call those models."""
