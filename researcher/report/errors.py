"""What a report refuses. Apart, because commands name it and the rest of the report takes long to import."""

from __future__ import annotations


class RecordsDisagree(ValueError):
    """A stored number is not what the records behind it give; the text names trial and metric."""


class UnknownName(ValueError):
    """An expression names what this study does not have."""
