"""The command-line parser of both programs: refuses abbreviations and suggests names for misspelt options."""

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
"""Error code for a command line that does not parse."""


class UsageError(Exception):
    """The command line does not parse; the message is one line that says what to do.

    `nearest` lists names that the user may have meant. `code` is the error code that programs branch on.
    """

    def __init__(self, message: str, nearest: Iterable[str] = (), *, code: str = USAGE) -> None:
        super().__init__(message)
        self.nearest = tuple(nearest)
        self.code = code


def error_line(text: str, *, code: str, nearest: Iterable[str] = ()) -> str:
    """Return the JSON line that `--json` prints on standard error for an error."""
    return json.dumps({"error": text, "code": code, "nearest": list(nearest)}) + "\n"


class Parser(argparse.ArgumentParser):
    """An argparse parser that refuses abbreviations and suggests the nearest name. On errors it prints one line and exits
    with code 2; with `--json` the line is JSON: `{"error", "code", "nearest"}`."""

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
        """Exit with an error about the first unknown word. `named` lists the commands on the command line, innermost last."""
        name, chosen = words[0].partition("=")[0], named[-1]
        guess = nearest(name, chosen.options())
        hint = f" (did you mean {guess}?)" if guess else ""
        beside = named[-2].commands().values() if named[1:] else ()
        holders = [f"`{each.prog}`" for each in beside if name in each.options()]
        if guess == name:
            hint = f" (write it after the command: {chosen.prog} {guess})"
        elif name.startswith("--") and holders:
            hint, guess = f" (it is an option of {', '.join(holders[:_MOST_HOLDERS])})", None
        chosen._end(f"unrecognized arguments: {' '.join(words)}", hint, guess)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check the value as argparse does, but add the nearest command to the error."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            guess = nearest(str(value), map(str, action.choices or ()))
            self._end(str(error), f" (did you mean {guess}?)" if guess else "", guess)

    def options(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def commands(self) -> dict[str, Parser]:
        """Return the subcommands by name."""
        return {
            name: parser
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
            for name, parser in action.choices.items()
        }

    def _named(self, given: Sequence[str]) -> list[Parser]:
        """Return this parser and the subcommands on the command line, innermost last: misspelt options belong to the last."""
        for number, word in enumerate(given):
            if word in self.commands():
                return [self, *self.commands()[word]._named(given[number + 1 :])]
        return [self]

    def _refuse_misspelt(self, given: Sequence[str]) -> None:
        """Refuse misspelt options before argparse reports the correctly spelt one as missing."""
        named = self._named(given)
        chosen = named[-1]
        known = {*self.options(), *chosen.options()}
        for word in _before_dashes(given):
            name = word.partition("=")[0]
            if _LONG_OPTION.fullmatch(name) and name not in known and nearest(name, chosen.options()):
                self._refuse_unknown(named, [word])


def _before_dashes(words: Sequence[str]) -> list[str]:
    """Return the words before `--`: only these may be options."""
    return list(itertools.takewhile(lambda word: word != "--", words))


def _with_negatives(words: Sequence[str]) -> list[str]:
    """Turn `--budget -5m` into `--budget=-5m`, so that the option itself can refuse a value that looks like an option.
    Words after `--` belong to another program's command and stay as they are."""
    result: list[str] = []
    options = _before_dashes(words)
    for word in options:
        if _NEGATIVE.match(word) and result and _LONG_OPTION.fullmatch(result[-1]):
            result[-1] += f"={word}"
        else:
            result.append(word)
    return [*result, *words[len(options) :]]
