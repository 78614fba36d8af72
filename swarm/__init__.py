"""The swarm: servers that host and train models, and clients that act in them."""
