"""`--help` of both commands: quick, and without anything that helps no one to read it."""

from __future__ import annotations

import pytest

from tests.cpu_time import runs_within

HEAVY = (
    *("torch", "vllm", "transformers", "numpy", "scipy", "mlflow", "langgraph", "sqlalchemy", "openai"),
    *("fastapi", "uvicorn", "httpx", "pydantic", "textual", "rich", "asyncio", "mcp", "anyio"),
)


@pytest.mark.parametrize(
    "line",
    [
        *("swarm --help", "swarm run start --help", "swarm serve --help", "swarm try --help", "swarm top --help"),
        *(
            "swarm join play --help",
            "swarm chat --help",
            "swarm episode run --help",
            "swarm replay --help",
            "swarm models export --help",
        ),
        *("researcher --help", "researcher start --help", "researcher daemon --help", "researcher doctor --help"),
        "researcher mcp --help",
    ],
)
def test_help_comes_in_half_a_second_and_loads_nothing_heavy(line: str) -> None:
    program, *arguments = line.split()
    code = f"import sys\nfrom {program}.main import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code"
    said = runs_within(0.5, code, *arguments, forbidden=HEAVY)
    assert f"usage: {program}" in said
