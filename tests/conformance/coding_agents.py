"""Coding agents from npm, unchanged: installed from their lock files, and played in episodes on a stage that makes them call tools."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from foundation.nearest import nearest
from swarm.client import AgentFailed, SwarmClient, run_agent
from swarm.protocol.episodes import EpisodeKind
from tests.conformance.environments import NotInstalled, cache_dir
from tests.conformance.frameworks import HERE, Framework, UnknownFramework
from tests.conformance.judgement import Judgement, Outcome, judge
from tests.conformance.stage import Stage
from tests.conformance.witness import Witness

SCRIPTS = HERE.parents[1] / "studies" / "repo_tasks" / "agents"
_TABLE = HERE / "coding_agents.toml"
_READY = ".ready"
LIMIT_S = 600.0
QUERY = "Look around in this folder with ls"
"""The last word is what the echo engine says: as a command it works."""


class CodingAgent(Framework):
    """One coding agent. Its script is the instrument's."""

    package: str
    program: str
    dialect: str
    tools: tuple[str, ...]
    """Calls that the stage asks for, in turn."""
    forced: str = "`tool_choice`, which the stage puts into its requests"

    @property
    def lock(self) -> Path:
        return self.folder / "package-lock.json"

    @property
    def script_path(self) -> Path:
        return SCRIPTS / f"{self.name}.sh"

    @property
    def version(self) -> str:
        """The pinned one."""
        packages = json.loads(self.lock.read_text())["packages"]
        return str(packages[f"node_modules/{self.package}"]["version"])


def coding_agents(only: Sequence[str] = ()) -> list[CodingAgent]:
    """All of the table, or those named, in the table's order. Raises: UnknownFramework."""
    table = TypeAdapter(list[CodingAgent]).validate_python(tomllib.loads(_TABLE.read_text())["agent"])
    known = [agent.name for agent in table]
    for name in only:
        if name not in known:
            raise UnknownFramework(f"no agent {name!r} in {_TABLE.name}; did you mean {nearest(name, known)}?")
    return [agent for agent in table if not only or agent.name in only]


def installed(agent: CodingAgent) -> Path:
    """npm's folder of the agent, made now from its lock if need be. Raises: NotInstalled."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise NotInstalled(f"{agent.name} needs node and npm")
    folder = cache_dir() / f"{agent.name}-{hashlib.sha256(agent.lock.read_bytes()).hexdigest()[:12]}"
    if not (folder / _READY).exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(agent.folder / name, folder / name)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--loglevel=error"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotInstalled(f"npm could not install {agent.name}: {done.stderr[-600:]}")
        (folder / _READY).touch()
    return folder / "node_modules"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the agent is told of the model. context, answer: in tokens."""

    context: int = 32768
    answer: int = 512


async def play(
    agent: CodingAgent,
    swarm: SwarmClient,
    stage: Stage,
    work: Path,
    *,
    run_id: str,
    reward: float,
    limits: Limits,
    tools: Sequence[str] | None = None,
    kind: EpisodeKind = "train",
) -> tuple[str, Outcome]:
    """One episode of the agent in the folder `work`: its id, and how the agent ended. tools: None: the table's.

    swarm: a client of the stage's address, so that the agent's calls pass it. Raises: NotInstalled.
    """
    modules = installed(agent)
    stage.force(agent.tools if tools is None else tools)
    variables = {
        "PATH": f"{modules / '.bin'}:/usr/local/bin:/usr/bin:/bin",
        "CONTEXT": str(limits.context),
        "MAX_TOKENS": str(limits.answer),
    }
    async with swarm.episode(task_id=f"agent-{agent.name}", run_id=run_id, kind=kind) as episode:
        try:
            end = await run_agent(
                episode,
                ["sh", str(agent.script_path)],
                work,
                query=QUERY,
                reads=[modules],
                variables=variables,
                limit_s=LIMIT_S,
            )
            outcome = Outcome(0, end.said.decode(errors="replace"), end.words)
        except AgentFailed as error:
            outcome = Outcome(1, error=str(error))
        episode.end(reward=reward, success=outcome.succeeded)
    return episode.id, outcome


async def rehearse_agent(
    agent: CodingAgent,
    swarm: SwarmClient,
    stage: Stage,
    witness: Witness,
    work: Path,
    *,
    run_id: str,
    reward: float,
    limits: Limits = Limits(),
) -> Judgement:
    """Play one episode, and judge what was recorded of it. Raises: NotInstalled."""
    witness.forget()
    episode_id, outcome = await play(agent, swarm, stage, work, run_id=run_id, reward=reward, limits=limits)
    calls = (await swarm.trace(episode_id)).calls
    judgement = judge(agent, agent.version, calls, witness.seen, outcome, None)
    judgement.faults += [f"the server refused {path}: {words}" for path, words in stage.refused]
    return judgement
