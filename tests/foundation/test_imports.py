"""Imports without a look for garbage."""

from __future__ import annotations

import gc
import importlib

import pytest

from foundation.imports import uncollected


def test_garbage_is_looked_for_again_afterwards_also_after_a_failed_import() -> None:
    with uncollected():
        looked = gc.isenabled()
    assert not looked
    with pytest.raises(ModuleNotFoundError), uncollected():
        importlib.import_module("a_module_that_is_not_there")
    assert gc.isenabled()
    gc.unfreeze()
