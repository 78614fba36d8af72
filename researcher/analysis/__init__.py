"""From trials to numbers, verdicts and decisions. Pure functions over records: no SQL, no HTTP, no clock, no LLM."""
