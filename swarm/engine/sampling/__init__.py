"""Sampling from vLLM's own server, for the local engine and the verl engine. Imports neither torch nor vllm."""
