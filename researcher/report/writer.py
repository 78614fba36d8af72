"""Writes the report's files: Markdown with its drawings, and one self-contained HTML file.

The content depends only on the records, so it can be rendered again and compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import unescape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from foundation.logs import redact
from foundation.paths import visible_files, write_atomically
from researcher.models import Claim, ReportSeal, StudyData
from researcher.report.drawing import standalone
from researcher.report.page import Page, page
from researcher.report.records import Records
from researcher.study.plan import Verdict

TEMPLATES = Path(__file__).parent / "templates"
_MARKS = re.compile(
    r"([\\`*\[\]<|~]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)|(?<=https)[:]|(?<=http)[:]|(?<=ftp)[:]|(?<=www)[.])", re.I
)
"""Characters that Markdown may interpret, except `_` inside a word, which is harmless."""
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters for terminals and for text direction."""
_MARKED = re.compile(r'<data value="[^"]*" title="([^"]*)">([^<]*)</data>')
_HIDDEN = re.compile(r"<(style|script|svg|data)\b.*?</\1>|<[^>\n]*>", re.S)
_NUMBER = re.compile(r"(?<![\w.])[+\u2212-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)")
_LONGEST_QUOTATION = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Result of `write_report`.

    The keys of `files` are `markdown`, `html` and, if there is something to draw, `curves` and `effects`.
    """

    folder: Path
    files: dict[str, str]
    claims: list[Claim]
    seal: ReportSeal
    answer: str
    """The report's answer as plain text."""


def write_report(data: StudyData, folder: Path) -> Written:
    """Write the report of a study into `folder`, replacing an earlier one.

    Raises: RecordsDisagree when a stored number differs from its series. Such a study gets no report.
    """
    whole = page(Records(data))
    rendered = render(whole)
    for name, text in rendered.values():
        write_atomically(folder / name, text.encode())
    seal = ReportSeal(
        files={kind: digest(text.encode()) for kind, (_, text) in rendered.items()},
        claims=claims_digest(whole.claims),
        wording=wording(),
    )
    files = {kind: str(folder / name) for kind, (name, _) in rendered.items()}
    return Written(folder=folder, files=files, claims=whole.claims, seal=seal, answer=answer_of(whole))


def render(whole: Page) -> dict[str, tuple[str, str]]:
    """Render all files. Returns the name and text of each, by kind."""
    found = {
        "markdown": ("report.md", tidy(markdown_templates().get_template("report.md.jinja").render(page=whole))),
        "html": ("report.html", html_templates().get_template("report.html.jinja").render(page=whole).lstrip()),
    }
    for kind, svg in (("curves", whole.curves), ("effects", whole.effects)):
        if svg:
            found[kind] = (f"{kind}.svg", standalone(svg))
    return found


def answer_of(whole: Page) -> str:
    """Return the report's answer as plain text on one line."""
    source = '{% import "prose.jinja" as prose with context %}{{ prose.answer(page) }}'
    return _seen(_plain().from_string(source).render(page=whole))


def digest(content: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def claims_digest(claims: Sequence[Claim]) -> str:
    """Return a digest of all claims, in order."""
    return digest(json.dumps([claim.model_dump(mode="json") for claim in claims], sort_keys=True).encode())


@cache
def wording(*further: Path) -> str:
    """Return a digest of the code and templates that determine a report's text, including the code in `further` folders.

    Only versions with equal digests are sure to write the same text for equal records.
    """
    folders = (TEMPLATES.parent, TEMPLATES.parents[1] / "analysis", *further)
    parts = [f"{name}\0".encode() + file.read_bytes() for folder in folders for name, file in visible_files(folder)]
    return digest(b"\0".join(parts))


@cache
def markdown_templates() -> Environment:
    """Return the Jinja environment for Markdown files. The filter `t` quotes a text."""
    made = _environment(autoescape=False)
    made.filters["t"] = quoted
    made.globals |= {"n": _plain_claim, "code": _code, "block": _block}
    return made


@cache
def _plain() -> Environment:
    made = _environment(autoescape=False)
    made.filters["t"] = _short
    made.globals |= {"n": lambda claim: claim.text, "code": str}
    return made


@cache
def html_templates() -> Environment:
    """Return the Jinja environment for HTML files, with autoescaping."""
    made = _environment(autoescape=True)
    made.filters["t"] = _short
    made.globals |= {"n": _marked_claim, "code": _html_code, "drawing": Markup, "block": _html_block}
    return made


def _environment(*, autoescape: bool) -> Environment:
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=autoescape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.globals["verdicts"] = [verdict.value for verdict in Verdict]
    return made


def _plain_claim(claim: Claim) -> str:
    return quoted(claim.text)


def _marked_claim(claim: Claim) -> Markup:
    value = "" if claim.value is None else claim.value
    return Markup('<data value="{}" title="{}">{}</data>').format(value, claim.expression, claim.text)


PRINTED: Mapping[str, Callable[[Claim], str]] = {"markdown": _plain_claim, "html": lambda claim: escape(claim.text)}
"""Function that prints a claim, by kind of file."""


def marked_claims(text: str) -> list[tuple[str, str]]:
    """List the marked claims of an HTML report, in order, as pairs of expression and text."""
    return [(unescape(expression), unescape(said)) for expression, said in _MARKED.findall(text)]


def visible(text: str) -> str:
    """Return the visible text of a report without its marked claims, line by line: no tags, styles or drawings."""
    return unescape(_HIDDEN.sub(lambda found: "\n" * found[0].count("\n") or " ", text))


def numbers_in(text: str) -> list[str]:
    """List the numbers in a text as written, with their signs: `+0.240`, `1,024`, `4e-05`."""
    return _NUMBER.findall(text)


def _code(name: str) -> str:
    """Format a name as a Markdown code span. Replaces characters that would end the span."""
    return f"`{_seen(name).replace('`', chr(0x2019)).replace('|', chr(0xA6))}`"


def _html_code(name: str) -> Markup:
    return Markup("<code>") + escape(_UNSEEN.sub(_named, name)) + Markup("</code>")


def _block(text: str) -> str:
    """Format lines as an indented code block, which no content can end."""
    return "\n".join(f"    {line}" for line in _lines(text))


def _html_block(text: str) -> Markup:
    return Markup("<pre>") + escape("\n".join(_lines(text))) + Markup("</pre>")


def _lines(text: str) -> list[str]:
    return [
        _UNSEEN.sub(_named, line.replace("\t", "    ")).rstrip() for line in redact(text).strip("\r\n").splitlines()
    ]


def _short(text: str) -> str:
    """Put a quotation on one line, remove secrets, and cut it if it is very long."""
    line = _seen(redact(text))
    return line if len(line) <= _LONGEST_QUOTATION else f"{line[:_LONGEST_QUOTATION]} …"


def _seen(text: str) -> str:
    """Put a text on one line, with names for invisible characters."""
    return _UNSEEN.sub(_named, " ".join(text.split()))


def _named(control: re.Match[str]) -> str:
    return f"[U+{ord(control[0]):04X}]"


def quoted(text: str) -> str:
    """Escape a quotation for Markdown, so that it creates no table, link, tag, entity or emphasis."""
    return _MARKS.sub(r"\\\1", _short(text))


def tidy(text: str) -> str:
    """Remove double blank lines, and blank lines between list items, from Markdown."""
    text = re.sub(r"\n{3,}", "\n\n", text.strip() + "\n")
    return re.sub(r"(?m)^(- .*)\n\n(?=- )", r"\1\n", text)
