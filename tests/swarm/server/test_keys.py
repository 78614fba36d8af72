"""Api keys and control tokens."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from foundation.logs import redact
from swarm.server.keys import ControlTokens, KeyRefused, Keyring, Role, TokenFault

ADMIN, CLIENT = "swt_admin-0123456789", "swt_client-0123456789"


def test_a_key_names_its_episode_and_carries_its_lease_sealed() -> None:
    ring = Keyring(b"k" * 32)
    key = ring.api_key("ep-1", "swl_secret")
    assert key.startswith("swk_")
    assert "secret" not in key
    assert ring.read(key).episode_id == "ep-1"
    assert ring.read(key).lease == "swl_secret"


def test_an_api_key_is_redacted_whole_from_log_lines() -> None:
    key = Keyring(b"k" * 32).api_key("ep-1", "swl_secret")
    assert redact(f"key={key} end") == "key=[redacted] end"


@pytest.mark.parametrize("position", [5, 12, -1])
def test_a_key_that_was_changed_anywhere_is_refused(position: int) -> None:
    ring = Keyring(b"k" * 32)
    key = ring.api_key("ep-1", "swl_secret")
    other = "A" if key[position] != "A" else "B"
    with pytest.raises(KeyRefused):
        ring.read(key[:position] + other + key[position:][1:])


@pytest.mark.parametrize("text", ["", "swk_", "swk_a.b", "swk_a.b.c", "sk-abc", "swk_é.b.c"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(KeyRefused):
        Keyring(b"k" * 32).read(text)


def test_another_servers_key_is_refused() -> None:
    with pytest.raises(KeyRefused):
        Keyring(b"a" * 32).read(Keyring(b"b" * 32).api_key("ep-1", "swl_x"))


def test_the_secret_is_kept_for_its_owner_alone_and_survives_a_restart(tmp_path: Path) -> None:
    key = Keyring.open(tmp_path / "secret").api_key("ep-1", "swl_x")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert Keyring.open(tmp_path / "secret").read(key).episode_id == "ep-1"


def test_without_tokens_everybody_is_an_admin() -> None:
    tokens = ControlTokens(None, None)
    assert not tokens.required
    assert tokens.role_of(None) is Role.ADMIN


def test_tokens_give_their_roles_and_nothing_else_does() -> None:
    tokens = ControlTokens(ADMIN, CLIENT)
    assert tokens.role_of(f"Bearer {ADMIN}") is Role.ADMIN
    assert tokens.role_of(f"bearer {CLIENT}") is Role.CLIENT
    for wrong in (None, "", "Bearer ", f"Bearer {ADMIN}x", f"Basic {ADMIN}", "Bearer é"):
        assert tokens.role_of(wrong) is None


def test_tokens_come_from_the_environment_or_from_files(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{ADMIN}\n")
    tokens = ControlTokens.load({"SWARM_CLIENT_TOKEN": CLIENT}, admin_file=file)
    assert tokens.role_of(f"Bearer {ADMIN}") is Role.ADMIN
    assert tokens.role_of(f"Bearer {CLIENT}") is Role.CLIENT


@pytest.mark.parametrize(("admin", "client"), [("short", None), (None, CLIENT), (ADMIN, ADMIN)])
def test_tokens_that_protect_nothing_are_refused(admin: str | None, client: str | None) -> None:
    with pytest.raises(TokenFault):
        ControlTokens(admin, client)


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenFault, match="nowhere"):
        ControlTokens.load({}, admin_file=tmp_path / "nowhere")


def test_a_team_key_fits_one_episode_of_one_server_and_is_kept_sealed() -> None:
    ours, theirs = Keyring(b"o" * 32), Keyring(b"t" * 32)
    key = theirs.team_key("ep-1")
    assert theirs.is_team_key(key, "ep-1")
    assert not theirs.is_team_key(key, "ep-2")
    assert not ours.is_team_key(key, "ep-1")
    assert not theirs.is_team_key("", "ep-1")
    sealed = ours.seal("ep-9", key)
    assert key not in sealed
    assert ours.unseal("ep-9", sealed) == key
