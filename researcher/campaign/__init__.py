"""Campaigns: a goal pursued through several studies. Deciding is pure, `loop` carries out the decisions, and SQL is the source of
truth."""
