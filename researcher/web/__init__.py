"""The web page of the researcher: what `researcher ui` shows, and the answers that people give on it.

Reads through the store, answers through `researcher.gates`; no SQL, no statistics, no report of its own.
"""
