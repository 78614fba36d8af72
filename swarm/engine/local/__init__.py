"""The engine for one machine: vLLM's own server and a torch trainer, as supervised child processes."""
