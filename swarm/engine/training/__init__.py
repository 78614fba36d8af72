"""Training code shared by the local engine and the verl engine: selection, the open run, its process, time limits and files."""
