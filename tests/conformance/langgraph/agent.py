"""langchain-openai and LangGraph: the ready agent with a middleware, and a graph of one's own with a tool node, streamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

SAMPLING: dict[str, Any] = {"temperature": float(os.environ["TEMPERATURE"])} if "TEMPERATURE" in os.environ else {}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@wrap_model_call
def tool_first(request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]) -> ModelResponse:
    used = any(isinstance(message, ToolMessage) for message in request.messages)
    settings = {**request.model_settings, "strict": True}
    return handler(request.override(tool_choice=None if used else "any", model_settings=settings))


def model(**fields: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=os.environ["BASE_URL"],
        api_key=os.environ["API_KEY"],
        model=os.environ["MODEL"],
        max_completion_tokens=120,
        max_retries=0,
        **fields,
        **SAMPLING,
    )


def took_turns(messages: list[Any]) -> bool:
    """One answer called the tool, perhaps more than once, and the next went on from the results."""
    types = [message.type for message in messages]
    return types == ["human", "ai", *["tool"] * (len(types) - 3), "ai"]


def ready_agent() -> str:
    agent = create_agent(model(), [add], system_prompt="Be brief.", middleware=[tool_first])
    messages = agent.invoke({"messages": [("user", "What is 17 + 25? Use the tool.")]})["messages"]
    assert took_turns(messages), messages
    return str(messages[-1].content)


def own_graph() -> str:
    forced = model(streaming=True, stream_usage=True).bind_tools([add], tool_choice="any", strict=True)
    free = model(streaming=True, stream_usage=True).bind_tools([add], strict=True)

    def think(state: MessagesState) -> dict[str, list[object]]:
        used = any(isinstance(message, ToolMessage) for message in state["messages"])
        return {"messages": [(free if used else forced).invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    last = None
    for mode, part in graph.compile().stream(
        {"messages": [("user", "What is 3 + 8? Use the tool.")]}, stream_mode=["values", "messages"]
    ):
        last = part if mode == "values" else last
    assert last is not None
    assert took_turns(last["messages"]), last
    return str(last["messages"][-1].content)


print(json.dumps({"answers": [ready_agent(), own_graph()]}))
