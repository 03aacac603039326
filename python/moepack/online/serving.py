"""The two sides of replacing weights while a model runs.

A packed module locks its own tensors for the time of a call: it sees one layer's old or new
weights. `serving` locks the whole model for the time of a `with` block: every layer old or new.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

from moepack.weight_lock import WeightLock

_LOCKS: WeakKeyDictionary[nn.Module, WeightLock] = WeakKeyDictionary()


def model_lock(model: nn.Module) -> WeightLock:
    """The lock of a model as a whole, by the module that `serving` and `reload_weights` get."""
    return _LOCKS.setdefault(model, WeightLock())


@contextmanager
def serving(model: nn.Module) -> Iterator[None]:
    """While it is held, `reload_weights(model, ...)` waits before it changes anything.

    For a forward that is to see all weights old or all new, and for callers of compiled graphs and
    in-memory ExportedPrograms, which take no lock. A thread may hold it more than once.
    """
    with model_lock(model).reading():
        yield
