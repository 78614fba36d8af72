"""Shared foundation of all packages: clock, ids, paths, logs, strict models. Imports none of our other packages."""
