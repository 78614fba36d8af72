"""Engines: they sample from one model and train it. They know nothing of HTTP surfaces, episodes' leases or pools."""
