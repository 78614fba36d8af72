"""Plan → trials on swarm servers: lease servers, start clients, watch, repair, record. Start reading at trials.py."""
