"""What every room stands on: clock, ids, paths, logs, strict models. Imports nothing of ours."""
