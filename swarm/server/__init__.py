"""The swarm server's control process: HTTP routes in front, server state and gateway behind. Imports neither torch nor vllm."""
