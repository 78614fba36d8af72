"""One framework's script in its environment: once on bare vLLM, once in an episode of a swarm server, and the judgement."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from swarm.client.sync import SwarmClient
from swarm.protocol.episodes import POLICY_MODEL
from tests.conformance import environments
from tests.conformance.frameworks import Framework
from tests.conformance.judgement import Judgement, Outcome, judge
from tests.conformance.witness import Witness

SCRIPT_LIMIT_S = 300.0
_KEPT_ERROR = 600


@dataclass(frozen=True, slots=True)
class Bare:
    """vLLM without a swarm server: its base URL (with /v1) and its name for the model."""

    base_url: str
    model: str
    api_key: str = "none"


def rehearse(
    framework: Framework,
    swarm: SwarmClient,
    *,
    run_id: str | None = None,
    bare: Bare | None = None,
    witness: Witness | None = None,
    python: Path | None = None,
) -> Judgement:
    """Run the script both ways at once: bare vLLM does not pass the witness. python: an interpreter that has the framework already.

    Raises: NotInstalled; SwarmError when the server grants no episode.
    """
    interpreter = python or environments.python_of(framework)
    if witness is not None:
        witness.forget()
    with ThreadPoolExecutor(max_workers=1) as beside:
        alone = None
        if bare is not None:
            alone = beside.submit(
                run_script, framework, interpreter, bare.base_url, bare.api_key, bare.model, temperature="0"
            )
        with swarm.episode(task_id=f"conformance-{framework.name}", kind="eval", run_id=run_id) as episode:
            outcome = run_script(
                framework, interpreter, episode.base_url, episode.api_key, POLICY_MODEL, temperature="0"
            )
            episode.end(reward=float(outcome.succeeded), success=outcome.succeeded)
    bare_outcome = None if alone is None else alone.result()
    calls = swarm.trace(episode.id).calls
    seen = None if witness is None else witness.seen
    return judge(framework, environments.version_of(framework), calls, seen, outcome, bare_outcome)


def run_script(
    framework: Framework, python: Path, base_url: str, api_key: str, model: str, *, temperature: str | None = None
) -> Outcome:
    """These settings and nothing else of ours; a home that is thrown away. temperature None: the script asks for none."""
    command = [str(python)] if framework.script.endswith(".py") else ["bash"]
    with tempfile.TemporaryDirectory() as home:
        told = {"BASE_URL": base_url, "API_KEY": api_key, "MODEL": model}
        told |= {} if temperature is None else {"TEMPERATURE": temperature}
        around = {"HOME": home, "PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "NO_PROXY": "127.0.0.1"}
        try:
            done = subprocess.run(
                [*command, str(framework.script_path)],
                cwd=home,
                env=around | told,
                capture_output=True,
                text=True,
                timeout=SCRIPT_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(124, error=f"not done within {SCRIPT_LIMIT_S:.0f} s")
    return Outcome(done.returncode, _last_json(done.stdout), done.stderr.strip()[-_KEPT_ERROR:])


def _last_json(stdout: str) -> str:
    """The script's own words: the last line that is a JSON object, whatever a framework prints around it."""
    for line in reversed(stdout.splitlines()):
        try:
            if isinstance(json.loads(line), dict):
                return line
        except json.JSONDecodeError:
            continue  # a framework's own line
    return ""
