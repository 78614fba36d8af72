"""The command line's parser: no abbreviations, nearest names for misspelt options, help in one place for both programs."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from foundation.nearest import nearest

_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_NEGATIVE = re.compile(r"-[\d.]")
_LONG_OPTION = re.compile(r"--[a-z][a-z-]*")
_CHOICE = re.compile(r"invalid choice: '([^']*)'")


class UsageError(Exception):
    """The command line cannot be understood; the message is one line that says what to do."""


class Parser(argparse.ArgumentParser):
    """argparse that refuses abbreviations and names what was probably meant. Exits with 2 and one line on errors, which is
    JSON where `--json` was given: `{"error", "nearest"}`."""

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
            self._named(given)[-1].error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed

    def error(self, message: str) -> NoReturn:
        guess = self._nearest(message)
        hint = f" (did you mean {guess}?)" if guess else ""
        if guess in message.split():
            hint = f" (write it behind the command: {self.prog} {guess})"
        if self._as_json:
            sys.stderr.write(json.dumps({"error": message + hint, "nearest": [guess] if guess else []}) + "\n")
        else:
            sys.stderr.write(f"{self.prog}: {message}{hint}; see `{self.prog} --help`\n")
        raise SystemExit(2)

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
        chosen = self._named(given)[-1]
        known = {*self.options(), *chosen.options()}
        for word in _before_dashes(given):
            name = word.partition("=")[0]
            if _LONG_OPTION.fullmatch(name) and name not in known and nearest(name, chosen.options()):
                chosen.error(f"unrecognized arguments: {word}")

    def _nearest(self, message: str) -> str | None:
        if (unknown := _UNKNOWN.search(message)) is not None:
            return nearest(unknown.group(1).split()[0].split("=")[0], self.options())
        if (choice := _CHOICE.search(message)) is not None:
            return nearest(choice.group(1), self.commands())
        return None


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
