"""The commands of `swarm`, one noun per file. Each imports what it needs when it runs, so that `--help` is instant."""
