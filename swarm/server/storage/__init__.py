"""The durable pool: what a server must remember, in one SQLite file. Refuses to know what the rows mean."""
