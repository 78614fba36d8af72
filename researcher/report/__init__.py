"""The report: computes claims from recorded trials, writes them as Markdown and HTML, and recomputes them in `verify`. No SQL."""
