"""Notices to people, by apprise: Slack, e-mail, webhooks. What is said, when, and by which service; no SQL."""
