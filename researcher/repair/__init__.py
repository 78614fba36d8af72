"""Repairs, writes and tests code of instruments: checks, rehearsal without a server, versions."""
