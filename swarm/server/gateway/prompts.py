"""What a request is sampled from: the echo rule of its form, over the calls of its episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swarm.engine.seam import Dialect, Engine
from swarm.protocol.episodes import RecordedCall
from swarm.server.gateway.forms import prompt_body, prompt_settings
from swarm.server.gateway.records import Records
from swarm.server.gateway.text_token_reuse import continued_text
from swarm.server.gateway.token_reuse import Prompt, TokenReuse


class Prompts:
    """The two echo rules over one engine's tokens."""

    def __init__(self, engine: Engine, records: Records) -> None:
        self._engine = engine
        self._records = records
        self._echo = TokenReuse(engine.decode)

    async def of(
        self, dialect: Dialect, body: dict[str, Any], agent: str | None, calls: Sequence[RecordedCall]
    ) -> Prompt:
        """Continue an earlier call of the episode token by token, where the engine's request `body` echoes one."""
        if dialect == "completions":
            return await continued_text(body["prompt"], calls, self._tokenise, self._engine.decode)

        async def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> list[int]:
            asked = prompt_body(body, messages)
            return await self._engine.render("chat.completions", asked, add_generation_prompt=add_generation_prompt)

        earlier = await self._records.earlier(calls, render)
        return await self._echo.prompt_for(body["messages"], prompt_settings(body), agent, earlier, render)

    async def count(self, body: dict[str, Any], calls: Sequence[RecordedCall]) -> int:
        """How many tokens the prompt of the chat `body` has, as it would be sampled from."""
        prompt = await self.of("chat.completions", body, None, calls)
        if prompt.prompt_ids is not None:
            return len(prompt.prompt_ids)
        return len(await self._engine.render("chat.completions", prompt_body(body, body["messages"])))

    async def _tokenise(self, text: str) -> list[int]:
        return await self._engine.render("completions", {"prompt": text, "add_special_tokens": False})
