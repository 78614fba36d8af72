"""Timetables of studies, and the daemon that continues studies by itself."""
