"""Writes, repairs and tests the code of instruments: static checks, rehearsal without a server, stored versions."""
