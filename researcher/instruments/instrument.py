"""Study environments: factors to vary, metrics to measure, and a trial's defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from foundation.strict import StrictModel
from swarm.protocol.algorithms import OWN_FIELDS

Scalar = bool | int | float | str
Direction = Literal["increase", "decrease"]
STUDY_STEPS, STUDY_MODEL = "study.steps", "study.model"
"""Targets that are not fields of a run: the length of a trial, and the model that its server hosts."""
RUN_PARAMETERS = "run.parameters"
"""Target that chooses between training all weights (`full`) and adapters (`lora`), which a server reports with rank and alpha."""
ALGORITHM = "run.algorithm.name"
"""Target of the algorithm, whose own defaults override those of the instrument."""
FUNCTIONS = tuple(f"run.algorithm.{field}" for field in OWN_FIELDS)
"""Targets that may name a user's function, FILE.py:NAME. The plan keeps the text of its file."""
LEARNING_RATE = "run.optimizer.learning_rate"
"""Target of the learning rate. At 0 a run trains nothing and is otherwise unchanged: a control."""


OUTCOME_NAME = r"^[A-Za-z0-9_.-]{1,100}$"
OutcomeName = Annotated[str, StringConstraints(pattern=OUTCOME_NAME)]
"""A key of `Outcome.metrics` that can become a metric."""


class Factor(StrictModel):
    """Something that a study may vary.

    Args:
        target: what a level sets. `run.<path>` is a field of the RunSpec (`run.optimizer.learning_rate`) for every trained model;
            `roles.<role>.<path>` is that field for one further role; `task.<name>` is passed to the instrument's `tasks`;
            `study.steps` is the length of a trial; `study.model` is the trained model, with choices from the smallest to the
            largest, and such arms run on separate servers.
        also: further fields of the RunSpec that are set to the same level.
        type: type of the levels. Topics spell out `text` and `data` levels: a text stands in quotes after the factor's name; data
            are a file (`path/to/train.jsonl`), which a plan pins by its digest, or a data set on Hugging Face's hub
            (`hf:owner/name`). An empty default of `data` means that the topic has to name some.
    """

    name: str
    target: str
    also: Annotated[tuple[str, ...], Field(exclude_if=lambda targets: not targets)] = ()
    type: Literal["float", "int", "bool", "choice", "text", "data"]
    default: Scalar
    low: float | None = None
    high: float | None = None
    choices: tuple[Scalar, ...] = ()
    proper: Annotated[bool, Field(exclude_if=lambda proper: not proper)] = False
    """Whether its choices are proper names: a topic may use one without the factor's name."""
    off: Annotated[Scalar | None, Field(exclude_if=lambda off: off is None)] = None
    """The level at which the factor is off, if not 0: all weights instead of adapters, a constant schedule."""
    on: Annotated[Scalar | None, Field(exclude_if=lambda on: on is None)] = None
    """A usual level at which the factor has an effect. None: the default has one, or no such level is declared."""
    needs: Annotated[str | None, Field(exclude_if=lambda needs: needs is None)] = None
    """Name of a factor that must not be 0 for this one to have an effect."""
    needs_any: Annotated[tuple[str, ...], Field(exclude_if=lambda names: not names)] = ()
    """Integer factors, at least one of which must be above its lowest level for this factor to have an effect. If the spec leaves them
    open, the first one is raised by one in all arms.
    """
    share: Annotated[bool | None, Field(exclude_if=lambda share: share is None)] = None
    """For a family's ratio in `batch.mix`: whether the level is its share of the whole, so that the others share the rest.

    None: decided by the factor's name (`share`, `fraction`, `percentage`); in a plan, a relative ratio.
    """
    scale: Literal["linear", "log"] = "linear"
    aliases: tuple[str, ...] = ()
    description: str = ""

    @property
    def takes_functions(self) -> bool:
        """Whether a user's function may be a level."""
        return self.target in FUNCTIONS

    @property
    def targets(self) -> tuple[str, ...]:
        """All targets that a level sets."""
        return self.target, *self.also

    @property
    def samples(self) -> bool:
        """Whether the factor affects how training answers are sampled."""
        return any(target.startswith("run.sampling.") for target in self.targets)


MetricKind = Literal[
    "heldout_accuracy",
    "heldout_reward",
    "auc_reward",
    "final_reward",
    "entropy_final",
    "steps_to_threshold",
    "seconds_to_threshold",
    "wall_s",
    "tokens_sampled",
    "outcome",
]
REWARDS: tuple[MetricKind, ...] = ("heldout_reward", "auc_reward", "final_reward")
"""Kinds that are means of rewards."""
TIMED: tuple[MetricKind, ...] = ("wall_s", "seconds_to_threshold")
"""Kinds that depend on how busy the machine is."""
UNTIL: tuple[MetricKind, ...] = ("steps_to_threshold", "seconds_to_threshold")
"""Kinds that count until a threshold is reached, which a trial may never do."""
COSTS: tuple[MetricKind, ...] = (*UNTIL, "wall_s", "tokens_sampled")
"""Kinds for which less is usually better. A declaration has to state their direction."""


class Metric(StrictModel):
    """One number of a trial, computed by `researcher.analysis.metrics` from recorded series, never by a client.

    Kinds: heldout_accuracy and heldout_reward (with `when` before, after or gain), auc_reward, final_reward, entropy_final,
    steps_to_threshold and seconds_to_threshold (with `threshold`), wall_s, tokens_sampled. `outcome` is a number that each episode
    reports in `Outcome.metrics` (with `when` before, after or gain over held-out episodes, or training for the mean over all
    steps).
    """

    name: str
    kind: MetricKind
    when: Literal["before", "after", "gain", "training"] = "after"
    source: Annotated[OutcomeName | None, Field(exclude_if=lambda source: source is None)] = None
    """For an outcome: its key in `Outcome.metrics`; None: the metric's own name."""
    true: Annotated[bool, Field(exclude_if=lambda true: not true)] = False
    """For an outcome: whether it measures what is really wanted. The sentinel `reward_against_success` compares the reward with it."""
    role: Annotated[str | None, Field(exclude_if=lambda role: role is None)] = None
    """Role of the model that is measured; None for the main one."""
    on: Annotated[str | None, Field(exclude_if=lambda on: on is None)] = None
    """Another instrument on whose held-out tasks the trained model is scored; None: the study's own. Only plans set it."""
    threshold: float | None = None
    direction: Direction = "increase"
    """The better direction. An instrument.toml has to state it for the kinds in COSTS."""
    margin: float
    """Smallest effect of interest, in the metric's unit."""
    sigma: float | None = None
    """Measured standard deviation between seeds at the defaults. Used for price estimates, never instead of the noise floor."""
    on_request: Annotated[bool, Field(exclude_if=lambda on_request: not on_request)] = False
    """Whether it is a shared metric that this instrument does not name. Plans include it only on request."""
    aliases: tuple[str, ...] = ()
    description: str = ""

    @property
    def asked(self) -> Metric:
        """Copy for a plan that requests this metric: `on_request` is false."""
        return self.model_copy(update={"on_request": False})

    @property
    def on_training(self) -> bool:
        """Whether it is measured on training episodes, which each arm samples by its own settings."""
        return self.kind in ("auc_reward", "final_reward", *UNTIL) or (
            self.kind == "outcome" and self.when == "training"
        )

    @property
    def part(self) -> str | None:
        """Prefix of its series' names, before a slash: the role, or `on:INSTRUMENT`. None: no prefix."""
        return self.role if self.on is None else elsewhere(self.on)

    @property
    def reported_as(self) -> str:
        """For an outcome: its key in `Outcome.metrics`."""
        return self.source or self.name


def elsewhere(instrument: str) -> str:
    """Return the name prefix of series that were measured on another instrument's tasks."""
    return f"on:{instrument}"


def heldout_outcome(name: str, when: str) -> str:
    """Return the series name of a value that held-out episodes report, by episode index. `when` is before or after."""
    return f"eval_outcome_{when}.{name}"


def trained_outcome(name: str) -> str:
    """Return the series name of a value that training episodes report, as the mean of each step."""
    return f"outcome.{name}"


HELDOUT_REWARD, HELDOUT_SUCCESS = "heldout_reward", "heldout_success"
"""Names of the interim evaluations' series: the mean over their tasks, by optimizer step."""


def interim_outcome(name: str) -> str:
    """Return the series name of a value that interim evaluations report: the mean over their tasks, by optimizer step."""
    return f"heldout_outcome.{name}"


class InstrumentDefaults(StrictModel):
    """Defaults of a trial, sized for two CPU cores."""

    steps: Annotated[int, Field(ge=1)]
    seeds: Annotated[int, Field(ge=2)] = 3
    max_seeds: Annotated[int, Field(ge=2)] = 5
    metric: str
    """Primary metric if the topic names none."""
    concurrency: Annotated[int, Field(ge=1)] = 64
    heldout_tasks: Annotated[int, Field(ge=1)] = 32
    heldout_episodes: Annotated[int, Field(ge=1)] = 2
    """Episodes per held-out task, sampled with the run's own sampling defaults."""
    heldout_temperature: Annotated[float, Field(ge=0)] = 0.0
    heldout_every: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations on some held-out tasks during training; 0: evaluate only before and after."""
    trial_s: Annotated[float, Field(gt=0)]
    """Expected wall time of a trial on two cores. Prices a study before there are measurements."""
    run: dict[str, Any] = {}
    """Run settings, merged over the RunSpec's defaults."""
    task: dict[str, Scalar] = {}
    """Parameters of the instrument's `tasks`."""


NO_INTERIM_FOR_TEAMS = "models that are trained together are evaluated only before and after training, because their servers step independently"


class Role(StrictModel):
    """A further model of an instrument, trained on its own server by the same episodes."""

    model: str | None = None
    """Name of the model; None: the instrument's model."""
    run: dict[str, Any] = {}
    """Run settings, merged over those of the instrument's own model."""


class Instrument(StrictModel):
    """A study environment under `studies/`, read from its `instrument.toml`."""

    name: str
    version: str
    title: str
    description: str = ""
    workflow: str = "workflow.py"
    """File in the instrument's folder that defines `tasks` and `rollout`."""
    requirements: str | None = None
    """File in the folder with all packages that clients need in addition to ours, pinned as name==version."""
    model: str
    reward: tuple[float, float] | None = None
    """The lowest and the highest reward of an episode, if bounded. A reward's margin must be narrower than this range."""
    keywords: tuple[str, ...] = ()
    generated: str | None = None
    """Name of the LLM that wrote the instrument, if no person did. It then runs only in a sandbox."""
    earlier: tuple[str, ...] = ()
    """Digests of earlier versions with the same tasks, workflow and reward. Studies frozen with one of them can continue."""
    general: bool = False
    """Whether topics that name no task are given to this instrument."""
    roles: dict[Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,31}$")], Role] = {}
    """Models in addition to `model`, by role. A trial needs a server for each; the workflow gets them by these names (`meet`)."""
    factors: tuple[Factor, ...]
    metrics: tuple[Metric, ...]
    defaults: InstrumentDefaults


# -- settings by dotted names: `optimizer.learning_rate` of a run --------------------------------------------------------


def leaf_at(settings: object, path: Iterable[str]) -> Any:
    """Return the value at a path, or None."""
    for part in path:
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def leaves(settings: Mapping[str, object], beneath: str = "") -> Iterator[tuple[str, object]]:
    """Yield all settings that are not tables themselves, by dotted name."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{beneath}{key}.")
        else:
            yield f"{beneath}{key}", value


def nested(path: str, value: object) -> dict[str, object]:
    """Nest a value under a dotted path: `nested("a.b", 1)` is `{"a": {"b": 1}}`."""
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}
