"""Rows as records: what can no longer be read as what was written is named, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

from foundation.strict import explain
from researcher.store.errors import Unreadable
from researcher.study.plan import Plan


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raises: Unreadable where a value is no JSON, or none that its field can hold."""
    try:
        yield
    except ValidationError as error:
        raise Unreadable(what, "; ".join(str(problem) for problem in explain(error, Plan))) from error
    except ValueError as error:
        raise Unreadable(what, str(error)) from error
