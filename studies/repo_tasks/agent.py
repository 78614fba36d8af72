"""A coding agent of the standard library alone: `python agent.py < TASK`, in the folder of the repository.

A plain tool loop over chat completions at OPENAI_BASE_URL. A model that calls no tool but writes a function has it put in place of
the one of that name: small models do that first. TURNS limits its calls, MAX_TOKENS each answer.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALL_LIMIT_S = 600.0
TESTS_LIMIT_S = 30.0
LONGEST = 4000
"""Characters of a tool's answer."""
SYSTEM = (
    "You mend a Python repository in the current folder. Look at the code with the tools, change it, and run the tests. "
    "When they pass, answer with one sentence and call no tool."
)


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    wanted = {each: {"type": "string", "description": text} for each, text in properties.items()}
    parameters = {"type": "object", "properties": wanted, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("list_files", "The paths of all files."),
    tool("read_file", "The text of a file.", path="the file"),
    tool("write_file", "Write a file anew.", path="the file", text="all of its text"),
    tool(
        "replace",
        "Replace a text that stands once in a file.",
        path="the file",
        old="what stands there",
        new="what should",
    ),
    tool("run_tests", "Run the tests."),
]


def main() -> int:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": sys.stdin.read()},
    ]
    for _ in range(int(os.environ.get("TURNS", "12"))):
        answer = asked(messages)
        if answer is None:
            break
        messages.append(answer)
        calls = answer.get("tool_calls") or []
        if not calls:
            put_in_place(answer.get("content") or "")
            break
        for call in calls:
            said = used(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": said[-LONGEST:]})
    sys.stdout.write(str(messages[-1].get("content") or ""))
    return 0


def asked(messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The model's message; None where the conversation no longer fits its context. Raises: URLError."""
    body = {
        "model": "policy",
        "messages": messages,
        "tools": TOOLS,
        "max_tokens": int(os.environ.get("MAX_TOKENS", "256")),
    }
    base_url = os.environ["OPENAI_BASE_URL"]
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({} if "//127.0.0.1" in base_url else None))
    try:
        with opener.open(request, timeout=CALL_LIMIT_S) as reply:
            message = json.load(reply)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        if error.code == 400 and len(messages) > 2:
            return None
        raise
    return {name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)} or {
        "role": "assistant"
    }


def used(name: str, arguments: str) -> str:
    """What a tool says; a fault of its arguments is said as well."""
    try:
        return DOES[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError, OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"


def list_files() -> str:
    return "\n".join(
        sorted(str(path) for path in Path().rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    )


def read_file(path: str) -> str:
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    Path(path).write_text(text)
    return "written"


def replace(path: str, old: str, new: str) -> str:
    before = Path(path).read_text()
    if before.count(old) != 1:
        return f"the text stands {before.count(old)} times in {path}; give one that stands there once"
    Path(path).write_text(before.replace(old, new))
    return "replaced"


def run_tests() -> str:
    command = [sys.executable, "-m", "unittest"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TESTS_LIMIT_S, check=False)
    return done.stderr + done.stdout


DOES: dict[str, Callable[..., str]] = {
    "list_files": list_files,
    "read_file": read_file,
    "write_file": write_file,
    "replace": replace,
    "run_tests": run_tests,
}


def put_in_place(answer: str) -> None:
    """Functions in the answer's code replace those of the same name."""
    parts = answer.split("```")
    code = parts[1].removeprefix("python") if len(parts) > 2 else answer
    try:
        written = [node for node in ast.parse(code.strip()).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):  # no code
        return
    for path in (path for path in Path().glob("*/*.py") if path.parts[0] != "tests"):
        for function in written:
            _replace_function(path, function)


def _replace_function(path: Path, function: ast.FunctionDef) -> None:
    text = path.read_text()
    try:
        body = ast.parse(text).body
    except SyntaxError:  # as an earlier turn left it
        return
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function.name:
            lines = text.splitlines()
            lines[node.lineno - 1 : node.end_lineno] = ast.unparse(function).splitlines()
            path.write_text("\n".join(lines) + "\n")
            return


if __name__ == "__main__":
    sys.exit(main())
