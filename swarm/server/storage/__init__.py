"""The durable pool: everything that a server must remember, in one SQLite file. Does not know what the rows mean."""
