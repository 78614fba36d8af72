"""Turns a topic into a draft study spec: with an LLM (`agent.py`) or by matching words (`matcher.py`).

Planning runs nothing. This package knows nothing of executors or SQL.
"""
