"""Campaigns: a goal pursued through several studies. Deciding is pure; `loop` carries it out, and SQL is the truth."""
