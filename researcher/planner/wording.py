"""The words of a topic: text → tokens with numbers in all usual forms, and the vocabulary of comparing.

English only. Knows nothing of factors, metrics or instruments.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from researcher.planner.paraphrases import LEVEL, NUMBER, reworded

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_DASHES = str.maketrans({"−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "’": "'", "→": " -> ", "≥": ">", "≤": "<"})
_GREEK = str.maketrans({"β": " beta ", "η": " learning rate "})

_TOKEN = re.compile(
    rf"""
      (?P<power>(?:{NUMBER}\s*[x×*·]\s*)?10\s*\^\s*[({{]?\s*[-+]?\d+[)}}]?|{NUMBER}\s*[x×*·]\s*10[-+]\d+)(?![\w.]*[a-z])
    | (?P<times>{NUMBER}(?:x|×)(?![a-z0-9]))
    | (?P<number>(?:(?<![\w)])-)?{LEVEL})(?P<percent>\s?%)?(?!\w)
    | (?P<word>[a-z]+'[a-z]+|\d*[a-z][a-z0-9]*|\d[^\W_]*)
    | (?P<mark>->|=>|>=|<=|[^\s\w])
    """,
    re.VERBOSE,
)


def words(text: str) -> frozenset[str]:
    """A vocabulary, written as a line of text."""
    return frozenset(text.split())


NUMBER_WORDS = {
    "zero": 0, "one": 1, "single": 1, "two": 2, "double": 2, "three": 3, "triple": 3, "four": 4, "five": 5, "six": 6,
    "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14,
    "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30,
    "forty": 40, "fifty": 50, "sixty": 60, "hundred": 100,
}  # fmt: skip

BETTER = words(
    "better best faster fastest quicker quickest sooner earlier easier easiest improve improved improving improvement help "
    "helped helping helpful beat beating outperform outperformed outperforming superior benefit benefited beneficial boost "
    "boosted boosting speed accelerate accelerated accelerating win overtake enhance enhanced enhancing hasten strengthen strengthened steeper dominate preferable cheaper worth exceed surpass gain good well"
)
WORSE = words(
    "worse worst slower slowest hurt hurting harm harmed harming harmful degrade degraded degrading degradation impair "
    "worsen worsened worsening deteriorate deteriorated deteriorating underperform underperforming undermine undermining impede "
    "impeding ruin ruining weaken weakening inhibit inhibiting impaired damage damaged damaging inferior insufficient slow later harder hinder hindered bad badly collapse collapsing break breaking suffer suffering losing"
)
MORE = words(
    "higher highest high increase increased increasing raise raised raising more most greater greatest larger largest large "
    "bigger biggest big longer grow growing rise rising lift lifting elevate elevated soar soaring jump up > >="
)
LESS = words(
    "lower lowest low lowering lowered decrease decreased decreasing reduce reduced reducing reduction less least fewer fewest "
    "smaller smallest small shorter drop dropping shrink shrinking fall falling decline declining cut cutting diminish diminished diminishing plummet plummeting down < <="
)
QUALITIES = words(
    "efficient efficiency fast quick quickly speed performance stable stability quality robust effective reliable reliability"
)
"""`more` of these is better, whatever the metric counts."""
SCALES = {
    "doubling": 2.0, "double": 2.0, "doubled": 2.0, "twice": 2.0, "halving": 0.5, "halve": 0.5, "halved": 0.5, "half": 0.5,
    "tripling": 3.0, "tripled": 3.0, "triple": 3.0, "quadrupling": 4.0, "quadrupled": 4.0, "quadruple": 4.0,
}  # fmt: skip
SWITCHED_ON = words("adding add added using use enabling enabled enable activating include including introducing")
SWITCHED_OFF = words(
    "without no removing remove removed dropping disabling disabled disable omitting omit eliminate eliminating"
)
METHODS = words(
    "ppo dpo sft dr reinforce rloo reinforce++ dapo gspo cispo kto orpo ppo2 a2c a3c trpo sac dqn remax vpg adam adamw adafactor sgd muon "
    "lion lora qlora distillation imitation warm warmup decay momentum scheduler"
)
"""Ways to train, other than the usual one, and parts of them."""
USUAL = "grpo"
_ORDINARY_PO = words("tempo typo repo expo hippo") | {USUAL}
BENCHMARKS = words(
    "gsm8k math500 aime aime24 aime25 humaneval mbpp mmlu gpqa alfworld webshop appworld hotpotqa triviaqa musique swebench bfcl "
    "livecodebench webarena olympiadbench svamp geometry3k sciworld scienceworld"
)
"""Tasks that people train on, and that are another question wherever no instrument has them."""
ARTICLES = words("a an the any some its of our this that")
ASKING = words("do doe did is are can could would will should")
"""Verbs that a question begins with."""
COPULAS = words("is are be was were get become becoming becomes go goe stay remain end")
SENTENCE_ENDS = words(". ! ? ;")
BUT = words("but yet so")


@dataclass(frozen=True, slots=True)
class Token:
    """One word, number or mark. key: singular and lower case; what phrases are compared by.

    value: of a number or a number word. times: a factor to multiply by (`10x`, `ten times`), never a level.
    """

    text: str
    key: str
    kind: Literal["word", "number", "times", "mark"]
    value: float | None = None


SO_FAR = Token("now", "now", "word")
"""Stands for each word of what is told, and not asked."""


def key_at(found: Sequence[Token], i: int) -> str:
    """A token's key; nothing beyond either end."""
    return found[i].key if 0 <= i < len(found) else ""


def key_behind_comma(found: Sequence[Token], comma: int) -> str:
    """How the clause behind it begins, after a `but`: `16 is slow, but is it more accurate?`"""
    return key_at(found, comma + 2 if key_at(found, comma + 1) in BUT else comma + 1)


def text_of(found: Sequence[Token], span: range) -> str:
    """Tokens as written, with spaces between them."""
    return " ".join(found[i].text for i in span)


def before_articles(found: Sequence[Token], i: int) -> int:
    """The last token before `i` that is no article; -1 where there is none."""
    i -= 1
    while key_at(found, i) in ARTICLES:
        i -= 1
    return i


def sentences(found: Sequence[Token], ends: Container[str]) -> Iterator[range]:
    """Where they stand, each with the mark that ends it."""
    start = 0
    for i, token in enumerate(found):
        if token.key in ends or i + 1 == len(found):
            yield range(start, i + 1)
            start = i + 1


def is_question(found: Sequence[Token], sentence: range) -> bool:
    """Whether a question mark ends it."""
    return found[sentence.stop - 1].key == "?"


def tokens(text: str) -> list[Token]:
    """The tokens of a text. Hyphens and underscores inside words count as spaces."""
    return list(_read(text))


@lru_cache(maxsize=4096)
def _read(text: str) -> tuple[Token, ...]:
    return tuple(_with_times([_token(match) for match in _TOKEN.finditer(_normalised(text))]))


@lru_cache(maxsize=4096)
def phrase(text: str) -> tuple[str, ...]:
    """The keys by which a name or alias is recognised. Of marks those count that stand for a word: `alpha/rank`."""
    return tuple(token.key for token in tokens(text) if token.kind != "mark" or token.key in ("/", ":"))


def is_method(key: str) -> bool:
    """Whether a word names a way to train: those known here, and all that are called so (`…PO`, policy optimisation)."""
    return key in METHODS or (len(key) > len("po") and key.endswith("po") and key not in _ORDINARY_PO)


def names_training(key: str) -> bool:
    """The same, or the usual way."""
    return key == USUAL or is_method(key)


def number_text(value: float) -> str:
    """A number as a person writes it: 4e-5, 0.7, 16."""
    text = f"{value:.10g}"
    if 0 < abs(value) < 1e-3 and "e" not in text:
        mantissa, _, exponent = f"{value:.9e}".partition("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{exponent}"
    return re.sub(r"e([+-]?)0*(\d)", lambda m: f"e{m.group(1).replace('+', '')}{m.group(2)}", text)


def _normalised(text: str) -> str:
    # Superscripts first: NFKC would turn 10⁻⁵ into 10-5.
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+", lambda m: "^" + m.group().translate(_SUPERSCRIPTS), text)
    text = unicodedata.normalize("NFKC", text.translate(_DASHES)).translate(_DASHES).lower().translate(_GREEK)
    text = re.sub(r"\breinforce ?\+\+", "reinforce pp", re.sub(r"\bdr[. ]* ?(?=grpo)", "dr ", text))
    text = reworded(re.sub(r"\bvs\. ?", "vs ", text))
    text = text.replace("**", "^").replace("_", " ")
    text = re.sub(r"(?<=[a-z])(?<!\de)-(?=[a-z0-9.])", " ", text)
    return re.sub(r"(?<=\d)-(?=[a-z])", " ", text)


def _token(match: re.Match[str]) -> Token:
    text = match.group()
    if match.group("power"):
        return Token(text, text, "number", _power(text))
    if match.group("times"):
        return Token(text, text, "times", float(text[:-1].replace(",", "")))
    if match.group("number"):
        value = float(match.group("number").replace(",", ""))
        value = value / 100 if match.group("percent") else value
        return Token(text, number_text(value), "number", value)
    if match.group("word"):
        word = text.removesuffix("'s")
        return Token(text, _singular(word), "word", NUMBER_WORDS.get(word))
    return Token(text, text, "mark")


def _power(text: str) -> float:
    """`1x10^-5`, `10^-5`, `4·10-5`."""
    mantissa, _, exponent = re.sub(r"[\s(){}]", "", text).rpartition("10")
    return float(f"{mantissa.rstrip('x×*·').replace(',', '') or 1}e{int(exponent.lstrip('^'))}")


def _singular(word: str) -> str:
    if len(word) > 5 and word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    plural = len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is"))
    return word[:-1] if plural else word


def _with_times(found: list[Token]) -> list[Token]:
    """`10 times`, `tenfold`, `by a factor of 10`, `50 % higher`: the number is what to multiply by."""
    result: list[Token] = []
    for i, token in enumerate(found):
        following = key_at(found, i + 1)
        before = [each.key for each in found[max(0, i - 2) : i]]
        if token.value is not None and (following in ("time", "fold", "x") or before == ["factor", "of"]):
            token = Token(token.text, token.key, "times", token.value)
        elif token.kind == "word" and token.key.endswith("fold") and token.key[:-4] in NUMBER_WORDS:
            token = Token(token.text, token.key, "times", float(NUMBER_WORDS[token.key[:-4]]))
        elif token.value is not None and token.text.endswith("%"):
            token = _share(found, i) or token
        result.append(token)
    return result


def _share(found: list[Token], i: int) -> Token | None:
    """`50% higher`, `raised by 50%`: what to multiply by; None for a percentage that is no change."""
    following = [each.key for each in found[i + 1 : i + 2]]
    earlier = [each.key for each in found[max(0, i - 7) : i]] if i and found[i - 1].key == "by" else []
    share = found[i].value or 0.0
    for keys in (following, earlier[::-1]):
        for key in keys:
            if key in MORE | LESS:
                return Token(found[i].text, found[i].key, "times", 1 + share if key in MORE else 1 - share)
    return None
