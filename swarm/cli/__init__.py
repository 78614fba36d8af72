"""The commands of `swarm`, one noun per file. Each command imports what it needs only when it runs, so that `--help` is instant."""
