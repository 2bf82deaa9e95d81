"""One signature for every kind of call."""

from __future__ import annotations

import inspect

import pytest

from edgebundle import AsyncModel, Model
from edgebundle.asking import Asking, Call


class Echo(Asking[Call]):
    def _ask(self, call: Call) -> Call:
        return call


def test_sync_and_async_models_are_called_in_the_same_way() -> None:
    calls = {inspect.getattr_static(kind, "__call__") for kind in (Model, AsyncModel, Asking)}
    assert len(calls) == 1


def test_arguments_arrive_as_they_were_given() -> None:
    ask = Echo()
    assert ask() == Call(None, tensors={})
    assert ask([1], deadline_s=2, traceparent="t", tracestate="s") == Call([1], None, 2, "t", "s", None, {})
    assert ask(image="a.jpg", progress=print, x=1, data=2) == Call(
        None, "a.jpg", progress=print, tensors={"x": 1, "data": 2}
    )
    with pytest.raises(TypeError):
        ask(1, 2)  # type: ignore[call-arg]
