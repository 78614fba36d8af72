"""The messages that servers and clients exchange: specs, episodes, status, errors. Knows neither HTTP nor torch."""
