"""Families of reasoning-gym by name, with their options, as endless streams of entries. Imports the package where it is first used."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import hashlib
import importlib.util
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm.client import SwarmError

BLOCK = 100
"""Entries that are made with one seed."""
OURS = ("seed", "size")
"""Options that are the instrument's to set."""

NONSENSE = "zzz"
"""Right in no family whose scorer looks at the answer."""

Option = bool | int | float | str


class MissingPackage(SwarmError):
    """A package that this instrument needs is not installed."""


def require_reasoning_gym() -> None:
    """Raises: MissingPackage, saying what to install."""
    if importlib.util.find_spec("reasoning_gym") is None:
        pins = Path(__file__).with_name("requirements.txt")
        raise MissingPackage(
            "reasoning_gym needs the package reasoning-gym, which is not installed here: "
            f"`researcher instruments --install reasoning_gym`, or pip install --no-deps -r {pins}"
        )


def names() -> list[str]:
    """Every family that the installed package knows."""
    require_reasoning_gym()
    import reasoning_gym  # noqa: F401 - fills the register
    from reasoning_gym.factory import DATASETS

    return sorted(name for name in DATASETS if name != "composite")


def options_of(text: str) -> dict[str, Option]:
    """`max_terms=2 max_digits=1`: names and values, separated by spaces or commas.

    Raises: ValueError for what is no such list, or sets what is the instrument's to set.
    """
    options: dict[str, Option] = {}
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise ValueError(f"options must be written name=value, such as max_terms=2; got {part!r}")
        if name in OURS:
            raise ValueError(f"the option {name} must be left to the instrument, which sets it for every trial")
        options[name] = _value(value)
    return options


def check(family: str, options: Mapping[str, Option]) -> None:
    """Raises: ValueError for an unknown family or option, with the nearest names, or one that the family refuses."""
    known = names()
    if family not in known:
        raise ValueError(f"reasoning-gym has no family {family!r}; {_hint(family, known)}")
    from reasoning_gym.factory import DATASETS

    fields = [field.name for field in dataclasses.fields(DATASETS[family][1]) if field.name not in OURS]
    for name in options:
        if name not in fields:
            raise ValueError(f"{family} has no option {name!r}; {_hint(name, fields)}")
    try:
        dataset = made(family, options, 0)
    except (AssertionError, TypeError, ValueError) as error:  # how the families refuse what they cannot make
        raise ValueError(f"{family} refuses the options {dict(options)}: {error}") from error
    if _pays_for(NONSENSE, dataset):
        raise ValueError(f"{family} counts any answer as right, by its own scorer: nothing can be learned from it")


def made(family: str, options: Mapping[str, Option], seed: int) -> Any:
    """The family's own data set of `BLOCK` entries."""
    from reasoning_gym import create_dataset

    return create_dataset(family, seed=seed, size=BLOCK, **options)


def entries(family: str, options: Mapping[str, Option], stream: str) -> Iterator[dict[str, Any]]:
    """Entries for ever: the same for the same family, options and name of the stream."""
    for block in itertools.count():
        seed = int.from_bytes(hashlib.sha256(f"{stream}/{block}".encode()).digest()[:4]) // 2
        dataset = made(family, options, seed)
        for index in range(BLOCK):
            with _drawn_from(f"{seed}/{index}"):
                entry = dataset[index]
            yield entry


@contextmanager
def _drawn_from(seed: str) -> Iterator[None]:
    """Some families draw from Python's own generator beside theirs: it is seeded for them, and then as it was."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


def _pays_for(answer: str, dataset: Any) -> bool:
    """Whether the family's scorer takes this for a right answer."""
    try:
        return bool(dataset.score_answer(answer, dataset[0]) >= 1.0)
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        NameError,
        SyntaxError,
        TypeError,
        ValueError,
    ):
        return False  # it cannot read the answer: then it does not pay for it either


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known)}"


def _value(text: str) -> Option:
    try:
        value = ast.literal_eval({"true": "True", "false": "False"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, bool | int | float) else text
