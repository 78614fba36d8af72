"""The command line's parser: no abbreviations, nearest names for misspelt options, help in one place for both programs."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from foundation.nearest import nearest

_NEGATIVE = re.compile(r"-[\d.]")
_MOST_HOLDERS = 3
_LONG_OPTION = re.compile(r"--[a-z][a-z-]*")


USAGE = "usage"
"""Code of an error in the command line itself."""


class UsageError(Exception):
    """The command line cannot be understood; the message is one line that says what to do.

    nearest: names that may have been meant. code: what programs branch on.
    """

    def __init__(self, message: str, nearest: Iterable[str] = (), *, code: str = USAGE) -> None:
        super().__init__(message)
        self.nearest = tuple(nearest)
        self.code = code


def error_line(text: str, *, code: str, nearest: Iterable[str] = ()) -> str:
    """An error as `--json` prints it on standard error: one line of JSON."""
    return json.dumps({"error": text, "code": code, "nearest": list(nearest)}) + "\n"


class Parser(argparse.ArgumentParser):
    """argparse that refuses abbreviations and names what was probably meant. Exits with 2 and one line on errors, which is
    JSON where `--json` was given: `{"error", "code", "nearest"}`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._as_json = False

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        given = _with_negatives(sys.argv[1:] if args is None else args)
        for each in self._named(given):
            each._as_json = "--json" in _before_dashes(given)
        self._refuse_misspelt(given)
        parsed, unknown = self.parse_known_args(given, namespace)
        if unknown:
            self._refuse_unknown(self._named(given), unknown)
        return parsed

    def error(self, message: str) -> NoReturn:
        self._end(message, "", None)

    def _end(self, message: str, hint: str, guess: str | None) -> NoReturn:
        if self._as_json:
            sys.stderr.write(error_line(message + hint, code=USAGE, nearest=[guess] if guess else []))
        else:
            sys.stderr.write(f"{self.prog}: {message}{hint}; see `{self.prog} --help`\n")
        raise SystemExit(2)

    def _refuse_unknown(self, named: Sequence[Parser], words: Sequence[str]) -> NoReturn:
        """named: the commands that were named, the innermost last."""
        name, chosen = words[0].partition("=")[0], named[-1]
        guess = nearest(name, chosen.options())
        hint = f" (did you mean {guess}?)" if guess else ""
        beside = named[-2].commands().values() if named[1:] else ()
        holders = [f"`{each.prog}`" for each in beside if name in each.options()]
        if guess == name:
            hint = f" (write it behind the command: {chosen.prog} {guess})"
        elif name.startswith("--") and holders:
            hint, guess = f" (it is an option of {', '.join(holders[:_MOST_HOLDERS])})", None
        chosen._end(f"unrecognized arguments: {' '.join(words)}", hint, guess)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's own, which names no command that may have been meant."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            guess = nearest(str(value), map(str, action.choices or ()))
            self._end(str(error), f" (did you mean {guess}?)" if guess else "", guess)

    def options(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def commands(self) -> dict[str, Parser]:
        """Subcommands by name."""
        return {
            name: parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for name, parser in action.choices.items()
        }

    def _named(self, given: Sequence[str]) -> list[Parser]:
        """This one, and the commands in it that were named, the innermost last: misspelt options belong to that."""
        for number, word in enumerate(given):
            if word in self.commands():
                return [self, *self.commands()[word]._named(given[number + 1 :])]
        return [self]

    def _refuse_misspelt(self, given: Sequence[str]) -> None:
        """Before argparse says that the option, rightly spelt, is missing."""
        named = self._named(given)
        chosen = named[-1]
        known = {*self.options(), *chosen.options()}
        for word in _before_dashes(given):
            name = word.partition("=")[0]
            if _LONG_OPTION.fullmatch(name) and name not in known and nearest(name, chosen.options()):
                self._refuse_unknown(named, [word])


def _before_dashes(words: Sequence[str]) -> list[str]:
    """Those that may be options."""
    return list(itertools.takewhile(lambda word: word != "--", words))


def _with_negatives(words: Sequence[str]) -> list[str]:
    """`--budget -5m` as `--budget=-5m`: a value that begins like an option reaches the option, which can say what is wrong.
    What stands behind `--` is somebody else's command."""
    result: list[str] = []
    options = _before_dashes(words)
    for word in options:
        if _NEGATIVE.match(word) and result and _LONG_OPTION.fullmatch(result[-1]):
            result[-1] += f"={word}"
        else:
            result.append(word)
    return [*result, *words[len(options) :]]
