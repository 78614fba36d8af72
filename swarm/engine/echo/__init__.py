"""A whole engine without torch or vllm, for trying things: it repeats the last word of the prompt, and learns to."""
