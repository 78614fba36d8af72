"""Where instruments' code is mended, written and tried: checked, rehearsed without a server, kept in versions."""
