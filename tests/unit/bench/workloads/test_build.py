"""Names lead to workloads; unknown names and options are one line."""

from __future__ import annotations

import pytest

from draftproof.bench.workloads.build import build_workload
from draftproof.bench.workloads.llm import LLMWorkload
from draftproof.bench.workloads.tts import TTSWorkload
from draftproof.errors import OptionError


def test_each_name_has_its_workload() -> None:
    assert isinstance(build_workload("llm", {"model": "m"}), LLMWorkload)
    assert isinstance(build_workload("tts", {"model": "m"}), TTSWorkload)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(OptionError, match="unknown workload 'image'; known: llm, tts"):
        build_workload("image", {})


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(OptionError, match="workload 'llm': .*'prompt_length'"):
        build_workload("llm", {"model": "m", "prompt_length": 3})
