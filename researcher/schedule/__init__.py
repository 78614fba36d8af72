"""Timetables of studies, and the daemon that continues studies without a person."""
