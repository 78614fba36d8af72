"""The swarm server's control process: HTTP in front, book and gateway behind. Imports neither torch nor vllm."""
