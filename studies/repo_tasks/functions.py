"""The functions that repositories are made of: their code as it should be, and arguments to try them with.

Each is pure, takes and returns JSON, and ends whatever its defect: loops run over what is given. Names in capitals are constants,
which a repository draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Arguments = Callable[[random.Random], list[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """module: the file that it stands in. constants: names in the source, and the values that they may have."""

    module: str
    name: str
    source: str
    arguments: Arguments
    constants: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def written(self, rng: random.Random) -> str:
        """The source with its constants drawn."""
        source = self.source.strip("\n") + "\n"
        for name, values in self.constants.items():
            source = source.replace(name, str(rng.choice(values)))
        return source


def _numbers(rng: random.Random, least: int = 0, most: int = 6, low: int = -9, high: int = 20) -> list[int]:
    return [rng.randint(low, high) for _ in range(rng.randint(least, most))]


def _words(rng: random.Random, least: int = 0, most: int = 5) -> list[str]:
    return [
        rng.choice(("red", "Blue", "green", "sky", "a", "Tea", "of", "stone")) for _ in range(rng.randint(least, most))
    ]


def _interval(rng: random.Random) -> list[int]:
    begin = rng.randint(0, 10)
    return [begin, begin + rng.randint(0, 6)]


FUNCTIONS = (
    Function(
        "prices",
        "total",
        '''
def total(prices, percent):
    """The sum of the prices less `percent` per cent, rounded down; at least LEAST."""
    amount = sum(prices)
    discount = amount * percent // 100
    return max(amount - discount, LEAST)
''',
        lambda rng: [_numbers(rng, low=1, high=40), rng.choice((0, 5, 10, 25, 50, 100))],
        {"LEAST": (0, 3, 5)},
    ),
    Function(
        "prices",
        "shipping",
        '''
def shipping(weight, express):
    """FREE or less costs nothing; each further kilogram costs RATE. Express doubles it and adds EXTRA."""
    if weight <= FREE:
        cost = 0
    else:
        cost = (weight - FREE) * RATE
    if express:
        cost = cost * 2 + EXTRA
    return cost
''',
        lambda rng: [rng.randint(0, 12), rng.random() < 0.5],
        {"FREE": (2, 4, 5), "RATE": (3, 7, 8), "EXTRA": (1, 9, 10)},
    ),
    Function(
        "texts",
        "slug",
        '''
def slug(title):
    """The title's words in lower case, joined by hyphens; anything but letters and digits separates words."""
    letters = [letter if letter.isalnum() else " " for letter in title.lower()]
    words = "".join(letters).split()
    return "-".join(words)
''',
        lambda rng: [rng.choice((" ", ", ", " - ", "!")).join(_words(rng, 1))],
    ),
    Function(
        "texts",
        "shorten",
        '''
def shorten(text, width):
    """The text if it has at most `width` characters, else its beginning and DOTS dots, `width` characters in all."""
    if len(text) <= width:
        return text
    kept = max(width - DOTS, 0)
    return text[:kept] + "." * (width - kept)
''',
        lambda rng: [" ".join(_words(rng)), rng.randint(0, 14)],
        {"DOTS": (1, 2, 3)},
    ),
    Function(
        "texts",
        "encode_runs",
        '''
def encode_runs(text):
    """Run lengths: "aab" is [["a", 2], ["b", 1]]."""
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs
''',
        lambda rng: ["".join(rng.choice("aab") for _ in range(rng.randint(0, 8)))],
    ),
    Function(
        "numbers",
        "median",
        '''
def median(values):
    """The middle value; of an even count the mean of the two in the middle. ValueError for no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
''',
        lambda rng: [_numbers(rng)],
    ),
    Function(
        "numbers",
        "clamp",
        '''
def clamp(value, low, high):
    """`value`, or the nearer of the bounds where it lies outside. ValueError for bounds in the wrong order."""
    if low > high:
        raise ValueError("low is above high")
    if value < low:
        return low
    if value > high:
        return high
    return value
''',
        lambda rng: [rng.randint(0, 9), rng.randint(0, 5), rng.randint(3, 9)],
    ),
    Function(
        "numbers",
        "roman",
        '''
def roman(number):
    """Roman numerals of a number from 1 to 399."""
    written = ""
    signs = [(100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")]
    for value, sign in signs:
        count = number // value
        written += sign * count
        number -= value * count
    return written
''',
        lambda rng: [rng.randint(1, 399)],
    ),
    Function(
        "dates",
        "is_leap",
        '''
def is_leap(year):
    """Whether the year has 366 days: every fourth, but of full centuries only every fourth."""
    if year % 100 == 0:
        return year % 400 == 0
    return year % 4 == 0
''',
        lambda rng: [rng.choice((1900, 2000, 2100, 2400, 2023, 2024, 2026, 1996))],
    ),
    Function(
        "dates",
        "minutes_between",
        '''
def minutes_between(begin, end):
    """Minutes from one time of day to another, both as [hour, minute]; an earlier end is on the next day."""
    first = begin[0] * 60 + begin[1]
    last = end[0] * 60 + end[1]
    if last < first:
        last += 24 * 60
    return last - first
''',
        lambda rng: [[rng.randint(0, 23), rng.randint(0, 59)], [rng.randint(0, 23), rng.randint(0, 59)]],
    ),
    Function(
        "lists",
        "chunks",
        '''
def chunks(items, size):
    """The items in lists of `size`, the last perhaps shorter. ValueError for a size below 1."""
    if size < 1:
        raise ValueError("size is below 1")
    return [items[at : at + size] for at in range(0, len(items), size)]
''',
        lambda rng: [_numbers(rng), rng.randint(0, 4)],
    ),
    Function(
        "lists",
        "unique",
        '''
def unique(items):
    """The items in their order, each once."""
    seen = []
    for item in items:
        if item not in seen:
            seen.append(item)
    return seen
''',
        lambda rng: [_numbers(rng, low=0, high=4)],
    ),
    Function(
        "lists",
        "rotate",
        '''
def rotate(items, by):
    """The items moved `by` places to the right; what falls off the end comes first."""
    if not items:
        return []
    cut = len(items) - by % len(items)
    return items[cut:] + items[:cut]
''',
        lambda rng: [_numbers(rng), rng.randint(0, 7)],
    ),
    Function(
        "intervals",
        "overlap",
        '''
def overlap(one, other):
    """How long two intervals [begin, end] overlap; 0 where they do not."""
    begin = max(one[0], other[0])
    end = min(one[1], other[1])
    return max(end - begin, 0)
''',
        lambda rng: [_interval(rng), _interval(rng)],
    ),
    Function(
        "intervals",
        "merged",
        '''
def merged(intervals):
    """The intervals in order, those that touch or overlap joined."""
    joined = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined
''',
        lambda rng: [[_interval(rng) for _ in range(rng.randint(0, 4))]],
    ),
    Function(
        "grids",
        "neighbours",
        '''
def neighbours(row, column, height, width):
    """The squares above, below, left and right of one, as [row, column], that lie on the grid."""
    around = [[row - 1, column], [row + 1, column], [row, column - 1], [row, column + 1]]
    return [[down, across] for down, across in around if 0 <= down < height and 0 <= across < width]
''',
        lambda rng: [rng.randint(0, 3), rng.randint(0, 3), 4, 4],
    ),
    Function(
        "grids",
        "diagonal",
        '''
def diagonal(grid):
    """The sum from the upper left to the lower right corner of a square grid."""
    found = 0
    for place, line in enumerate(grid):
        found += line[place]
    return found
''',
        lambda rng: [[_numbers(rng, 3, 3) for _ in range(3)]],
    ),
    Function(
        "settings",
        "read_pairs",
        '''
def read_pairs(text):
    """"a=1;b=2" as {"a": "1", "b": "2"}; of a name that stands twice the last value counts, what has no = is left out."""
    pairs = {}
    for part in text.split(";"):
        name, sign, value = part.partition("=")
        if sign:
            pairs[name.strip()] = value.strip()
    return pairs
''',
        lambda rng: [
            ";".join(rng.choice(("a=1", "b = 2", " c=x ", "d", "a=", "=4", "")) for _ in range(rng.randint(0, 4)))
        ],
    ),
    Function(
        "scores",
        "ranking",
        '''
def ranking(points):
    """Names by points, the most first; equal ones by name."""
    return [name for name, _ in sorted(points.items(), key=lambda pair: (-pair[1], pair[0]))]
''',
        lambda rng: [{name: rng.randint(0, 3) for name in rng.sample(("ann", "bob", "cy", "dee"), rng.randint(0, 4))}],
    ),
    Function(
        "scores",
        "grade",
        '''
def grade(points, most):
    """"A" from HIGH per cent of the most points on, "B" from LOW on, else "C"."""
    share = points * 100 // most
    if share >= HIGH:
        return "A"
    if share >= LOW:
        return "B"
    return "C"
''',
        lambda rng: [rng.randint(0, 20), 20],
        {"HIGH": (80, 85, 90), "LOW": (50, 55, 60)},
    ),
)
