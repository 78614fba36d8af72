"""Engines sample from one model and train it. They know nothing of HTTP, leases or sample pools."""
