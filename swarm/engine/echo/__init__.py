"""A complete engine without torch or vllm, for trying things out: it learns to repeat the last word of the prompt."""
