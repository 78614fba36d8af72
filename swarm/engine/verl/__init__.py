"""The engine for one to many GPU nodes: verl's FSDP2 workers and vLLM replicas on Ray, driven by one child process."""
