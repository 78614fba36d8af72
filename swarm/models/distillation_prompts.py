"""The prompts for distillation, each with a maximum answer length. Knows nothing about models.

Most are sums, because our studies train on those. The rest are several kinds of short chat, so that the smaller model keeps its
language skills. There are no answers here: the teacher provides them, right or wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SHORT, LONG = 8, 40
"""Maximum length of short and long answers, in tokens."""

_SUMS = (
    "What is {a}+{b}? Answer with the number only.",
    "What is {a} + {b}?",
    "{a}+{b}=",
    "Add {a} and {b}. Answer with the number only.",
    "How much is {a} plus {b}?",
)
_SHORT_ASKED = (
    "What is {a}-{b}? Answer with the number only.",
    "What is {a}*{b}? Answer with the number only.",
    "Which is larger, {a} or {b}? Answer with the number only.",
    "What is {c}+{d}? Answer with the number only.",
    "What number comes after {c}? Answer with the number only.",
    "Name a {thing}. One word only.",
    "What is the opposite of {word}? One word only.",
    "Which comes first in the alphabet, {word} or {other}? Answer with the word only.",
    "Repeat after me: {word} {other}",
    "Is {c} an even number? Answer yes or no.",
)
_LONG_ASKED = (
    "Write two sentences about {topic}.",
    "Explain {topic} to a child.",
    "Give me three tips on {topic}.",
    "What do you know about {topic}?",
    "Write a short story that begins with {topic}.",
    "Why do people care about {topic}?",
    "Use each of the numbers {a}, {b} and {c} once, with + - * and brackets, to reach {d}. Answer with the expression only.",
    "I think of a number between {a} and {c}. Guess it, and say why.",
    "Tom has {a} apples and buys {b} more. How many does he have now? Think step by step.",
    "List {a} words that have to do with {topic}.",
    "Write a polite letter about {topic}.",
    "Rewrite this sentence in other words: people talk about {topic} more than before.",
)
_THINGS = (
    "colour",
    "fruit",
    "city",
    "river",
    "tool",
    "bird",
    "country",
    "language",
    "metal",
    "sport",
    "month",
    "planet",
)
_WORDS = (
    *(
        "hot",
        "cold",
        "big",
        "small",
        "early",
        "late",
        "open",
        "closed",
        "light",
        "dark",
        "happy",
        "sad",
        "fast",
        "slow",
    ),
    *(
        "near",
        "far",
        "high",
        "low",
        "rich",
        "poor",
        "north",
        "south",
        "apple",
        "stone",
        "house",
        "tree",
        "water",
        "fire",
    ),
    *("bread", "chair", "window", "garden", "letter", "music", "bridge", "winter", "summer", "forest", "ocean"),
)
_TOPICS = (
    "the sea",
    "cooking rice",
    "learning to read",
    "bicycles",
    "the moon",
    "a good night's sleep",
    "train journeys",
    "growing tomatoes",
    "computers",
    "the seasons",
    "an old library",
    "playing chess",
    "running",
    "honey bees",
    "saving money",
    "writing letters",
    "volcanoes",
    "friendship",
    "the history of paper",
    "weather forecasts",
    "cats and dogs",
    "city traffic",
    "electric light",
    "making music",
    "a long winter",
    "public parks",
    "teaching arithmetic",
    "fishing boats",
    "maps",
    "clean water",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `most` is the maximum length of its answer, in tokens."""

    text: str
    most: int


def prompts(sums: int, short: int, long: int, seed: int) -> list[Prompt]:
    """Generate this many prompts of each kind, reproducibly for each seed. All one-digit sums occur before any of them repeats."""
    rng = random.Random(f"distillation/{seed}")
    pairs = [(a, b) for a in range(10) for b in range(10)]
    asked = []
    for place in range(sums):
        if place % len(pairs) == 0:
            rng.shuffle(pairs)
        a, b = pairs[place % len(pairs)]
        # Most prompts use the wording of the sums instrument.
        form = _SUMS[0] if rng.random() < 0.75 else rng.choice(_SUMS)
        asked.append(Prompt(form.format(a=a, b=b), SHORT))
    asked += [Prompt(_filled(rng, rng.choice(_SHORT_ASKED)), SHORT) for _ in range(short)]
    asked += [Prompt(_filled(rng, rng.choice(_LONG_ASKED)), LONG) for _ in range(long)]
    return asked


def _filled(rng: random.Random, form: str) -> str:
    word, other = rng.sample(_WORDS, 2)
    return form.format(
        a=rng.randint(1, 9),
        b=rng.randint(1, 9),
        c=rng.randint(10, 99),
        d=rng.randint(10, 99),
        thing=rng.choice(_THINGS),
        word=word,
        other=other,
        topic=rng.choice(_TOPICS),
    )
