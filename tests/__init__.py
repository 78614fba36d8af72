"""The tests. A package, so that no dependency that ships one of this name stands in its place."""
