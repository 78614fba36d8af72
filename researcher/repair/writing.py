"""Has an LLM write an instrument for a topic. Our code writes its declaration, tests it in the sandbox and keeps it if it passes.

Checks, in order:

- The code parses and defines the names that clients call.
- Every rehearsed episode ends with a reward.
- A right answer gets a higher reward than a wrong one, and a wrong one at least as much as an empty one.
- Held-out tasks are the same for every seed, and none is a training task.
- All this holds at two levels of each factor, and the two levels differ in their tasks or rewards.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, ValidationError, ValidationInfo, field_validator, model_validator

from foundation.strict import StrictModel, explain, misfit
from researcher.instruments.catalogue import DECLARATION, InstrumentFolder, read_instrument
from researcher.instruments.declaration import shared_factors
from researcher.instruments.instrument import Scalar
from researcher.llm.endpoint import LlmUnusable
from researcher.llm.templates import filled
from researcher.refusals import PlanningRefused
from researcher.repair.asking import PROMPTS, Form, Llm, Unreadable, ask, object_in, prompt, strict, told
from researcher.repair.code import Unfit, check_entries, parsed, public
from researcher.repair.rehearsal import Played, Rehearsal, RehearsalRequest, check, rehearse

NEW = "new"
"""Placeholder name of an instrument while it is being written."""
ANSWERS = 3
EXAMPLES = ("right", "wrong", "empty")
_WORKFLOW, _REWARD = "workflow.py", "reward.py"
_HELDOUT, _LISTED = 24, 500
_MOST_FACTORS = 6
_TAKEN = ("split", "seed", "count")

_TEXT, _COUNT = {"type": "string"}, {"type": "integer"}
_BOUND = {"type": ["number", "null"]}
_FACTOR = strict(
    name=_TEXT,
    type={"type": "string", "enum": ["int", "float", "bool", "choice"]},
    default={"type": ["number", "string", "boolean"]},
    low=_BOUND,
    high=_BOUND,
    choices={"type": "array", "items": _TEXT},
    aliases={"type": "array", "items": _TEXT},
    description=_TEXT,
)
_FORM = Form(
    "instrument",
    "workflow",
    strict(
        name=_TEXT,
        title=_TEXT,
        description=_TEXT,
        keywords={"type": "array", "items": _TEXT},
        max_tokens=_COUNT,
        factors={"type": "array", "items": _FACTOR},
        workflow=_TEXT,
        reward=_TEXT,
    ),
)

Line = Annotated[str, StringConstraints(min_length=1, max_length=400, pattern=r"^[^\n]*$")]


Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{1,31}$")]


class WrittenFactor(StrictModel):
    """A factor of the new instrument: a parameter of its `tasks`."""

    name: Name
    type: Literal["int", "float", "bool", "choice"]
    default: Scalar
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    aliases: tuple[Line, ...] = ()
    description: Line

    @field_validator("default")
    @classmethod
    def _of_its_type(cls, default: Scalar, info: ValidationInfo) -> Scalar:
        whole = info.data.get("type") == "int" and isinstance(default, float) and default.is_integer()
        return int(default) if whole else default

    @model_validator(mode="after")
    def _has_two_levels(self) -> Self:
        if self.name in {factor.name for factor in shared_factors()}:
            raise misfit({"name": f"every study can already vary {self.name}; leave it out"})
        if self.name in _TAKEN:
            raise misfit({"name": f"tasks already has an argument {self.name}; choose another name"})
        if self.type in ("int", "float") and (self.low is None or self.high is None or self.low >= self.high):
            raise misfit({"low": "a numeric factor needs bounds, with low below high"})
        if self.type == "choice" and len(set(self.choices)) < 2:
            raise misfit({"choices": "needs at least two choices"})
        return self

    @property
    def ends(self) -> tuple[Scalar, Scalar]:
        """The two levels to rehearse at: the lowest and the highest, or the first and the last choice."""
        match self.type:
            case "bool":
                return False, True
            case "choice":
                return self.choices[0], self.choices[-1]
            case "int":
                return int(self.low or 0), int(self.high or 0)
        return float(self.low or 0), float(self.high or 0)


class WrittenInstrument(StrictModel):
    """The LLM's answer: the code of a new instrument and its factors."""

    name: Name
    title: Line
    description: Annotated[str, StringConstraints(min_length=1, max_length=2000)]
    keywords: Annotated[tuple[Line, ...], Field(min_length=1, max_length=40)]
    max_tokens: Annotated[int, Field(ge=1, le=131_072)]
    factors: Annotated[tuple[WrittenFactor, ...], Field(max_length=_MOST_FACTORS)] = ()
    workflow: Annotated[str, StringConstraints(min_length=1)]
    reward: Annotated[str, StringConstraints(min_length=1)]


async def write_instrument(
    topic: str,
    llm: Llm,
    root: Path,
    model: str,
    tell: Callable[[str], None] = lambda _: None,
    *,
    answers: int = ANSWERS,
) -> InstrumentFolder:
    """Create a new instrument in its own folder under `root`, marked as generated.

    Raises: PlanningRefused with the last problem, when no answer passes the checks or the LLM cannot be used.
    """
    messages = [
        {"role": "system", "content": prompt("instrument.md")},
        {"role": "user", "content": f"The question of the study: {topic}"},
    ]
    wrong = ""
    for answer in range(1, answers + 1):
        try:
            raw = await ask(llm, messages, _FORM, f"instrument, answer {answer}")
        except LlmUnusable as error:
            raise PlanningRefused(f"the planner LLM {llm.model} wrote no instrument: {error}") from error
        try:
            written = WrittenInstrument.model_validate(object_in(raw, _FORM))
            return await _tried(written, llm.model, root, model)
        except ValidationError as error:
            wrong = "; ".join(str(problem) for problem in explain(error, WrittenInstrument))
        except (Unreadable, Unfit, PlanningRefused) as error:
            wrong = str(error)
        tell(f"answer {answer} of {llm.model} is not an instrument: {wrong.splitlines()[-1][:200]}")
        messages = [*messages, *told(raw, wrong)]
    raise PlanningRefused(
        f"{llm.model} gave {answers} answers, but no instrument that passes the checks; the last problem: {wrong}. To use an "
        "existing instrument, see `researcher instruments`"
    )


async def _tried(written: WrittenInstrument, author: str, root: Path, model: str) -> InstrumentFolder:
    """Test the instrument and move it to its place. Raises: Unfit; PlanningRefused for an invalid declaration."""
    parsed(_REWARD, written.reward)
    check_entries(_WORKFLOW, written.workflow)
    if "examples" not in public(parsed(_WORKFLOW, written.workflow)):
        raise Unfit(f"{_WORKFLOW} defines no function 'examples'")
    place = _laid_down(written, author, root, model)
    try:
        found = read_instrument(place)
        await _self_test(found.path, written.factors)
        return _moved(found, root / f"{written.name}-{found.code[:8]}")
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _laid_down(written: WrittenInstrument, author: str, root: Path, model: str) -> Path:
    """Write the three files into a temporary folder."""
    root.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(dir=root, prefix=".new-"))
    fields = written.model_dump(include={"name", "title", "description", "keywords", "max_tokens", "factors"})
    declaration = filled(PROMPTS, "instrument.toml.jinja", **fields, model=model, generated=author)
    for name, text in ((DECLARATION, declaration), (_WORKFLOW, written.workflow), (_REWARD, written.reward)):
        (place / name).write_text(text, encoding="utf-8")
    return place


def _moved(found: InstrumentFolder, home: Path) -> InstrumentFolder:
    """Move the folder to its final place, or reuse an identical earlier one."""
    if not home.exists():
        found.path.chmod(0o755)
        found.path.rename(home)
    return read_instrument(home)


async def _self_test(folder: Path, factors: Sequence[WrittenFactor]) -> None:
    """Run all checks. `folder` must be absolute. Raises: Unfit."""
    usual = {factor.name: factor.default for factor in factors}
    request = RehearsalRequest(
        folder=str(folder),
        workflow=_WORKFLOW,
        parameters=usual,
        examples=True,
        heldout=_HELDOUT,
        listed=_LISTED,
    )
    first = await _sound(request)
    listed = request.model_copy(update={"plays": False})
    if (await rehearse(listed)).tasks != first.tasks:
        raise Unfit(
            "tasks(…) yields different tasks when called again with the same seed; take all randomness from random.Random(seed)"
        )
    other = await rehearse(listed.model_copy(update={"seed": 1}))
    if other.tasks.get("heldout") != first.tasks["heldout"]:
        raise Unfit("tasks('heldout', …) changes with the seed; every seed must be evaluated on the same tasks")
    _check_apart(first, other)
    for factor in factors:
        levels = [request.model_copy(update={"parameters": {**usual, factor.name: level}}) for level in factor.ends]
        low, high = [await _sound(each) for each in levels]
        if _shown(low) == _shown(high):
            raise Unfit(
                f"the factor {factor.name!r} changes nothing: at {factor.ends[0]} and at {factor.ends[1]}, tasks(…) yields the same "
                "tasks, and every answer gets the same reward; make it change the tasks, or leave it out"
            )


async def _sound(request: RehearsalRequest) -> Rehearsal:
    """Rehearse, and check the result. Raises: Unfit, naming the parameters if there are any."""
    found = await rehearse(request)
    try:
        check(found)
        check_scores(found)
        _check_apart(found)
    except Unfit as error:
        at = ", ".join(f"{name}={level}" for name, level in request.parameters.items())
        raise Unfit(f"with {at}: {error}" if at else str(error)) from error
    return found


def _check_apart(*rehearsals: Rehearsal) -> None:
    """Check that no held-out task is also a training task. Raises: Unfit."""
    heldout, train = (
        {task for each in rehearsals for task in each.tasks.get(split, [])} for split in ("heldout", "train")
    )
    if shared := heldout & train:
        raise Unfit(f"some held-out tasks are also training tasks: {', '.join(sorted(shared))}")


def _shown(rehearsal: Rehearsal) -> object:
    """Return the tasks and rewards of a rehearsal, for comparison with another rehearsal."""
    played = [(each.name, each.reward, each.success, each.asked) for each in rehearsal.played]
    return rehearsal.tasks, played


def check_scores(rehearsal: Rehearsal) -> None:
    """Check the reward on every rehearsed task. Raises: Unfit unless right > wrong >= empty."""
    by_task: dict[tuple[str, str], dict[str, Played]] = {}
    for each in rehearsal.played:
        if isinstance(each.answer, str):
            by_task.setdefault((each.split, each.task), {})[each.answer] = each
    if not by_task:
        raise Unfit("examples(task) gives no answers")
    for (_, task), given in by_task.items():
        missing = [name for name in EXAMPLES if name not in given]
        if missing:
            raise Unfit(f"examples of task {task!r} lack {', '.join(missing)}")
        right, wrong, empty = (_worth(given[name]) for name in EXAMPLES)
        if not right > wrong >= empty:
            raise Unfit(
                f"the rewards of task {task!r} are in the wrong order: the right answer gets {right:g}, the wrong one {wrong:g}, "
                f"an empty one {empty:g}; they must satisfy right > wrong >= empty"
            )


def _worth(played: Played) -> float:
    return math.nan if played.reward is None else played.reward
