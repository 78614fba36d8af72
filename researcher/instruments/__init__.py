"""Environments that a study can run on: their declarations, where they are found, and what they share."""
