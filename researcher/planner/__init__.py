"""Topic → draft of a study spec: by an LLM (`agent.py`) or word by word (`matcher.py`). Knows no executor and no SQL; runs nothing."""
