"""Runs code written by an LLM: in bubblewrap if available, else under limits that the process sets for itself."""
