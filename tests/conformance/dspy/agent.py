"""dspy: a ReAct module with a tool: one step with the tool, one that finishes, and the extraction of the answer.

Its adapter writes calls as text with headings, and builds the prompt of each turn anew. The fields are held to their form by
a regular expression, which the language model of a module may carry.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ.setdefault("DSPY_CACHEDIR", tempfile.mkdtemp())

import dspy

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}
USED: list[int] = []
STEP = (
    r"\[\[ ## next_thought ## \]\]\n[A-Z][a-z ]{4,40}\.\n\n\[\[ ## next_tool_name ## \]\]\nadd\n\n"
    r'\[\[ ## next_tool_args ## \]\]\n\{"a": [1-9][0-9]{0,2}, "b": [1-9][0-9]{0,2}\}\n\n\[\[ ## completed ## \]\]'
)
ANSWER = (
    r"\[\[ ## reasoning ## \]\]\n[A-Z][a-z ]{4,40}\.\n\n\[\[ ## answer ## \]\]\n[1-9][0-9]{0,2}\n\n"
    r"\[\[ ## completed ## \]\]"
)


def add(a: int, b: int) -> int:
    """Add two numbers."""
    USED.append(a + b)
    return a + b


def held_to(pattern: str) -> dspy.LM:
    fields: dict[str, Any] = {"extra_body": {"structured_outputs": {"regex": pattern}}}
    return dspy.LM(
        f"openai/{os.environ['MODEL']}",
        api_base=os.environ["BASE_URL"],
        api_key=os.environ["API_KEY"],
        cache=False,
        num_retries=0,
        max_tokens=200,
        **fields,
        **SAMPLING,
    )


dspy.configure(lm=held_to(ANSWER), adapter=dspy.ChatAdapter())
agent = dspy.ReAct("question -> answer", tools=[add], max_iters=2)
agent.react.lm = held_to(STEP)
prediction = agent(question="What is 17 + 25?")
assert len(USED) == 2, prediction
print(json.dumps({"answers": [prediction.answer], "tools": USED}))
