"""The planner that asks an LLM: it chooses among validated instruments, factors and levels; code builds the plan."""
