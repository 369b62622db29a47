"""Reaching a Ray cluster, or one line that says why not."""

from __future__ import annotations

import sys

import pytest

from draftproof import nodes
from draftproof.errors import OptionError, UsageError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "no such host:6379", "nonsense"])
def test_an_address_where_no_cluster_is(address: str) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UsageError, match="no Ray cluster at") as caught:
        nodes.connect(address)
    assert repr(address) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"pip install 'draftproof\[ray\]'"):
        nodes.connect("auto")


def test_a_nodes_own_message_is_one_line() -> None:
    error = RuntimeError("ray::make()\ntraceback\ndraftproof.errors.UsageError: no space left")
    assert nodes.reason(error) == "no space left"
    wrapped = RuntimeError("outer")
    wrapped.cause = UsageError("inner")  # type: ignore[attr-defined]
    assert nodes.reason(wrapped) == "inner"
