"""Notices to people through apprise (Slack, e-mail, webhooks): their text, their timing, their services. No SQL."""
