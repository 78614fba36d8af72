"""Environments that a study can run on: what they declare, where they are found, what all of them share."""
