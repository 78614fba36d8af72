"""Api keys and control tokens."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from foundation.logs import redact
from swarm.server.keys import ControlTokens, KeyRefused, Keyring, Role, TokenFault

ADMIN, CLIENT = "swt_admin-0123456789", "swt_client-0123456789"


OLD_API_KEY = "swk_ZXAtMQ.ul53O9siblPzHQ.WOR1vOCaZyjwxmLRiFHAyRVq"
OLD_TEAM_KEY, OLD_SEALED = "swd_1fxZrxZLHoZi_wU8sDrs7iPJ", "f56YADOkvLf41VQDDM_nw8i27fQhTFrQBgZSXQ"
"""Of episode ep-1, and of another server's ep-1 as stored with ep-9: what the first version made under 32 times `k`."""


def test_an_api_key_is_redacted_whole_from_log_lines() -> None:
    assert redact("key=swk_ep-1.Zm9v-YmFy_ end") == "key=[redacted] end"
    assert redact(f"key={OLD_API_KEY} end") == "key=[redacted] end"


def test_a_key_that_an_older_server_signed_still_names_its_episode() -> None:
    assert Keyring(b"k" * 32).episode_of_old_key(OLD_API_KEY) == "ep-1"
    assert Keyring(b"b" * 32).episode_of_old_key(OLD_API_KEY) is None


@pytest.mark.parametrize("position", [5, 12, -1])
def test_an_old_key_that_was_changed_anywhere_is_none(position: int) -> None:
    other = "A" if OLD_API_KEY[position] != "A" else "B"
    changed = OLD_API_KEY[:position] + other + OLD_API_KEY[position:][1:]
    assert Keyring(b"k" * 32).episode_of_old_key(changed) is None


@pytest.mark.parametrize("text", ["", "swk_", "swk_a.b", "swk_a.b.c", "sk-abc", "swk_é.b.c", "swk_ep-1.secret"])
def test_what_is_no_old_key_is_none(text: str) -> None:
    assert Keyring(b"k" * 32).episode_of_old_key(text) is None


def test_a_team_key_is_no_api_key() -> None:
    ring = Keyring(b"k" * 32)
    mac = ring.team_key("ep-1").partition("_")[2]
    for forged in (f"swk_team:ep-1.{mac}", f"swk_team:ep-1..{mac}", f"swd_team:ep-1.{mac}"):
        assert ring.episode_of_old_key(forged) is None


def test_the_secret_is_kept_for_its_owner_alone_and_survives_a_restart(tmp_path: Path) -> None:
    key = Keyring.open(tmp_path / "secret").team_key("ep-1")
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert Keyring.open(tmp_path / "secret").is_team_key(key, "ep-1")


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
    sealed = ours.seal(key)
    assert key not in sealed
    assert ours.unseal("ep-9", sealed) == key
    with pytest.raises(KeyRefused):
        theirs.unseal("ep-9", sealed)


def test_a_team_key_that_an_older_server_stored_can_be_read_with_its_secret_alone() -> None:
    assert Keyring(b"k" * 32).unseal("ep-9", OLD_SEALED) == OLD_TEAM_KEY
    for ring, episode_id in ((Keyring(b"b" * 32), "ep-9"), (Keyring(b"k" * 32), "ep-8")):
        with pytest.raises(KeyRefused):
            ring.unseal(episode_id, OLD_SEALED)
