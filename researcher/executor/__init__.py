"""Plan → trials on swarm servers: leases servers, starts clients, follows, repairs, records. Start at trials.py."""
