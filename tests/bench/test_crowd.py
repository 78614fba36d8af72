"""Processes of clients: all of them begin together, and one that fails is not waited for."""

from __future__ import annotations

import os
from multiprocessing.synchronize import Barrier

import pytest

from bench.crowd import portion, together


def meet(name: str, barrier: Barrier) -> str:
    barrier.wait()
    return name


def die_at(name: str, barrier: Barrier) -> str:
    if name == "b":
        os._exit(3)
    barrier.wait()
    return name


def test_each_process_gives_back_what_it_did() -> None:
    assert sorted(together(meet, [("a",), ("b",), ("c",)])) == ["a", "b", "c"]


def test_a_process_that_dies_ends_the_others_which_wait_for_it() -> None:
    with pytest.raises(RuntimeError, match="a client process failed"):
        together(die_at, [("a",), ("b",)])


def test_portions_make_up_the_whole() -> None:
    assert [portion(10, 4, index) for index in range(4)] == [3, 3, 2, 2]
