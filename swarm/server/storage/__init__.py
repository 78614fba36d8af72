"""The database on disk ("the pool"): everything that a server must remember, in one SQLite file. Does not know what rows mean."""
