"""How much memory inference and training need, and how a device is divided between them. Imports neither torch nor vllm."""
