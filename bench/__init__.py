"""One question per file, answered in JSON lines; the last line is the summary."""
