"""What the local engine and the verl engine share: selection, the run that is trained, its process, limits and files."""
