"""What the local engine and the verl engine share to sample from vLLM's own server. Imports neither torch nor vllm."""
