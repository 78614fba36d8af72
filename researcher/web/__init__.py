"""The researcher's web page, served by `researcher ui`. People can answer gates and start work on it.

It reads through the store and answers through `researcher.gates`. It has no SQL, statistics or report of its own.
"""
