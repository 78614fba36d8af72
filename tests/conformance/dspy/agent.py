"""dspy: a ReAct module with a tool, its fields by the JSON adapter's schema."""

from __future__ import annotations

import json
import os
import tempfile

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
os.environ.setdefault("DSPY_CACHEDIR", tempfile.mkdtemp())

import dspy  # noqa: E402

USED: list[object] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    USED.append(a + b)
    return a + b


lm = dspy.LM(
    f"openai/{os.environ['MODEL']}",
    api_base=os.environ["BASE_URL"],
    api_key=os.environ["API_KEY"],
    cache=False,
    num_retries=0,
    temperature=0,
    max_tokens=200,
)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())
prediction = dspy.ReAct("question -> answer", tools=[add], max_iters=2)(question="What is 17 + 25?")
print(json.dumps({"answers": [str(prediction.answer)], "tools": USED, "calls": len(lm.history)}))
