"""One machine: vLLM's own server and a torch trainer as supervised children."""
