"""How a server in doubt asks a decider: whatever its client named, there is a decision or there is none."""

from __future__ import annotations

import httpx
import pytest

from swarm.protocol.errors import ErrorCode, InvalidSpec, Refusal
from swarm.protocol.teams import Decider
from swarm.server.keys import Keyring
from swarm.server.state.rows import TeamRow
from swarm.server.team_resolver import DeciderSilent, Peers

pytestmark = pytest.mark.anyio

KEYS = Keyring(b"k" * 32)


def team(decider_id: str) -> TeamRow:
    return TeamRow(
        seq=1,
        episode_id="ep-1",
        decider_url="http://127.0.0.1:8642",
        decider_id=decider_id,
        sealed_key=KEYS.seal(KEYS.team_key(decider_id)),
        patience_s=60.0,
        prepared_at=0.0,
        prepare_digest="",
        result={"reward": 1.0},
    )


async def asked(decider_id: str) -> bytes:
    """The path under which a server asks for this decider's decision."""
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.raw_path)
        return httpx.Response(200, json={"episode_id": decider_id, "decision": "committed"})

    peers = Peers(KEYS, any_loopback=True, transport=httpx.MockTransport(answer))
    assert (await peers.ask(team(decider_id))).decision == "committed"
    return seen[0]


@pytest.mark.parametrize(
    ("decider_id", "named"), [("ep-2", b"ep-2"), ("a\nb", b"a%0Ab"), ("../x?y#z", b"..%2Fx%3Fy%23z")]
)
async def test_a_decider_is_asked_for_the_very_episode_that_was_named(decider_id: str, named: bytes) -> None:
    assert await asked(decider_id) == b"/swarm/v1/episodes/" + named + b"/decision"


async def test_of_an_episode_that_no_address_can_name_nothing_is_concluded() -> None:
    with pytest.raises(DeciderSilent):
        await asked("a" * 100_000)


async def test_an_answer_that_is_no_decision_concludes_nothing() -> None:
    """Whatever stands between the servers may say 404."""
    peers = Peers(KEYS, any_loopback=True, transport=httpx.MockTransport(lambda request: httpx.Response(404)))
    with pytest.raises(DeciderSilent):
        await peers.ask(team("ep-2"))


async def test_a_key_that_was_sealed_under_another_secret_asks_nobody() -> None:
    with pytest.raises(DeciderSilent):
        await Peers(Keyring(b"n" * 32), any_loopback=True).ask(team("ep-2"))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8642/\x7f", "http://127.0.0.1:8642/" + "a" * 100_000])
def test_a_decider_whose_address_is_none_is_refused(url: str) -> None:
    with pytest.raises(Refusal) as caught:
        Peers(KEYS, any_loopback=True).vouch(Decider(url=url, episode_id="ep-2", key="swd_k"))
    assert caught.value.code is ErrorCode.INVALID_SPEC


@pytest.mark.parametrize("port", ["99999", "-1", "x"])
def test_a_decider_at_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(InvalidSpec, match=r"(?i)port"):
        Decider(url=f"http://127.0.0.1:{port}", episode_id="ep-2", key="swd_k")
