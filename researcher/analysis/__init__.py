"""Turns trials into numbers, verdicts and decisions. Pure functions over records: no SQL, no HTTP, no clock, no LLM."""
