"""The report: claims compiled from recorded trials, written as Markdown and HTML, recomputed by `verify`. Knows no SQL."""
