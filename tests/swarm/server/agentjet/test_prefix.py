"""The file of secret prefixes: what is taken, and that no refusal repeats a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.server.agentjet.prefix import Prefixes, PrefixFault
from swarm.server.keys import Role

ADMIN, CLIENT = "admin-secret-0123456789", "client-secret-012345678"
GOOD = f'admin = "{ADMIN}"\nclient = "{CLIENT}"\n'


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_each_secret_has_its_role(tmp_path: Path) -> None:
    prefixes = Prefixes.load(written(tmp_path / "prefix.toml", GOOD))
    assert prefixes.role_of(ADMIN) is Role.ADMIN
    assert prefixes.role_of(CLIENT) is Role.CLIENT
    assert [prefixes.role_of(wrong) for wrong in ("", ADMIN[:-1], ADMIN + "0", "ä")] == [None] * 4
    assert ADMIN not in repr(prefixes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + 'clint = "x"\n', "did you mean client"),
        (f'admin = "{ADMIN}"\n', "client must be"),
        (f'admin = "{ADMIN}"\nclient = "short"\n', "client must be"),
        (f'admin = "{ADMIN}"\nclient = "with/slash-{CLIENT}"\n', "client must be"),
        (f'admin = "{ADMIN}"\nclient = "{ADMIN}"\n', "must differ"),
        (f"admin: {ADMIN}", "is not TOML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(PrefixFault, match=says) as caught:
        Prefixes.load(written(tmp_path / "prefix.toml", text))
    assert ADMIN not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(PrefixFault, match="chmod 600"):
        Prefixes.load(written(tmp_path / "prefix.toml", GOOD, mode))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrefixFault, match="cannot read"):
        Prefixes.load(tmp_path / "none.toml")
