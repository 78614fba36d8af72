from __future__ import annotations

from foundation.streams import one_line, printable


def test_what_a_terminal_would_obey_is_written_out() -> None:
    said = "a\x1b]0;owned\x07b\nü\x00"
    assert printable(said) == "a\\x1b]0;owned\\x07b\nü\\x00"
    assert one_line(said) == "a ]0;owned b ü"
