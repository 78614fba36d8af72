"""The messages that servers and clients exchange: specs, episodes, status and errors. Imports neither HTTP libraries nor torch."""
