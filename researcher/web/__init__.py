"""The researcher's web page, served by `researcher ui`. On it, people can answer gates and start work.

It reads through the store and answers through `researcher.gates`. It has no SQL, statistics or report of its own.
"""
