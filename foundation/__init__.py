"""What all packages build on: clock, ids, paths, logs, strict models. Imports none of our other packages."""
