"""The worker's side of the pipe: settings, answers, errors; and both real arms on a tiny model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import machine
from draftproof.bench import worker
from draftproof.errors import ModelFileError, OptionError
from draftproof.models.stock import StockModel
from draftproof.record import Machine, Trace
from draftproof.stats import decode_stats
from draftproof.wire import decode

SETTINGS = {
    "kind": "stock", "folder": "somewhere", "dtype": "float32", "device": "cpu", "claim": "auto",
    "threads": None, "draft_model": None, "exit_layer": None,
}  # fmt: skip
ENGINE = {**SETTINGS, "kind": "engine"}
PROMPT = list(b"the other, the other, the")
REQUEST = {"prompt_ids": PROMPT, "max_new_tokens": 24, "drafter": "auto", "depth": 4, "options": {}}
Conversation = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Conversation:
    """Serve the given messages in this process; the answers."""

    def conversation(*messages: dict[str, Any]) -> list[dict[str, Any]]:
        answers = io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(m) + "\n" for m in messages)))
        monkeypatch.setattr(sys, "stdout", answers)
        worker.serve()
        return [json.loads(line) for line in answers.getvalue().splitlines()]

    return conversation


def use(monkeypatch: pytest.MonkeyPatch, kind: str, decode_one: worker.Decode) -> list[dict[str, Any]]:
    """Let ``decode_one`` stand in for the model of ``kind``; the settings it was made from."""
    seen: list[dict[str, Any]] = []

    def make(settings: dict[str, Any]) -> worker.Decode:
        seen.append(settings)
        return decode_one

    monkeypatch.setattr(worker, f"_{kind}", make)
    return seen


class Session:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def verify(self, token_ids: list[int]) -> list[int]:
        return [token + self.capacity for token in token_ids]


def test_every_verification_of_every_session_is_counted() -> None:
    counter = worker.Counter()
    opened = worker.counting(Session, counter)
    one, two = opened(10), opened(20)
    assert counter.num_calls == 0
    assert (one.verify([1, 2, 3]), two.verify([1]), one.verify([])) == ([11, 12, 13], [21], [])
    assert counter.num_calls == 3
    assert (one.capacity, two.capacity) == (10, 20)


@pytest.mark.slow
def test_the_counts_start_from_zero_and_options_reach_generate(
    tiny_folder: Any, talk: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an end token that comes early, both arms go on only when told the fewest tokens."""
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path))
    plain = StockModel(tiny_folder("llama"), torch.float32, torch.device("cpu")).generate(PROMPT, 12)
    end = plain[3]
    ends_at = plain.index(end) + 1
    settings = {"folder": str(tiny_folder("llama", eos_token_id=end)), "threads": 1}
    free = {**REQUEST, "max_new_tokens": 12, "drafter": "none", "depth": "auto"}
    held = {**free, "options": {"min_new_tokens": 12}}
    num_threads = torch.get_num_threads()
    try:
        for kind in (SETTINGS, ENGINE):
            _, *answers = talk({**kind, **settings}, free, held, free)
            assert [len(answer["token_ids"]) for answer in answers] == [ends_at, 12, ends_at]
            assert [answer["num_forwards"] for answer in answers] == [ends_at - 1, 11, ends_at - 1]
            assert answers[0]["token_ids"] == list(plain[:ends_at])
            assert end not in answers[1]["token_ids"][:11]
    finally:
        torch.set_num_threads(num_threads)


def test_the_peak_is_of_this_request_alone(talk: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[Any] = []

    def decode_one(request: dict[str, Any]) -> dict[str, Any]:
        order.append("decode")
        if request["depth"] == 0:
            raise OptionError("no")
        return {"token_ids": [7], "peak_bytes": -1}

    use(monkeypatch, "engine", decode_one)
    monkeypatch.setattr(machine, "reset_peaks", lambda device: order.append(("reset", device.type)))
    monkeypatch.setattr(machine, "peak_bytes", lambda: order.append("peak") or 123)
    monkeypatch.setattr(machine, "peak_cuda_bytes", lambda device: 45)
    _, *answers = talk(ENGINE, {"depth": 1}, {"depth": 0}, {"depth": 1})
    assert order == [("reset", "cpu"), "decode", "peak"] * 3
    assert [answer["peak_bytes"] for answer in answers] == [123, 123, 123]
    assert [answer["peak_cuda_bytes"] for answer in answers] == [45, 45, 45]


def fail(*_: Any) -> dict[str, Any]:
    raise AssertionError("the other arm was built")


@pytest.mark.parametrize("kind", ["stock", "engine"])
def test_the_machine_comes_first_then_one_answer_a_request(
    kind: str, talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_engine" if kind == "stock" else "_stock", fail)
    seen = use(monkeypatch, kind, lambda request: {"token_ids": request["prompt_ids"]})
    settings = {**SETTINGS, "kind": kind}
    told, *answers = talk(settings, {"prompt_ids": [1, 2]}, {"prompt_ids": [3]})
    assert seen == [settings]
    assert decode(Machine, told["machine"]).device == "cpu"
    assert [answer["token_ids"] for answer in answers] == [[1, 2], [3]]
    assert all(isinstance(a["peak_bytes"], int) and a["peak_bytes"] > 10 << 20 for a in answers)


def test_a_failed_request_answers_with_its_reason_and_the_worker_lives_on(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode_one(request: dict[str, Any]) -> dict[str, Any]:
        if request["depth"] < 0:
            raise OptionError("depth must be 0 or more")
        return {"token_ids": [7]}

    use(monkeypatch, "engine", decode_one)
    _, bad, good = talk(ENGINE, {"depth": -1}, {"depth": 0})
    assert bad["error"] == "depth must be 0 or more"
    assert "token_ids" not in bad
    assert good["token_ids"] == [7]
    assert "error" not in good


def test_a_model_that_cannot_be_loaded_ends_the_worker_with_its_reason(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(settings: dict[str, Any]) -> worker.Decode:
        raise ModelFileError("corrupt")

    monkeypatch.setattr(worker, "_stock", make)
    assert talk(SETTINGS, REQUEST) == [{"error": "corrupt"}]


def test_a_folder_that_is_not_there(tmp_path: Path, talk: Conversation) -> None:
    (answer,) = talk({**ENGINE, "folder": str(tmp_path / "no-such-folder")})
    assert list(answer) == ["error"]
    assert "no-such-folder" in answer["error"]


def test_threads_are_set_before_the_model_is_built(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[Any] = []
    monkeypatch.setattr(torch, "set_num_threads", order.append)

    def make(settings: dict[str, Any]) -> worker.Decode:
        order.append("built")
        return lambda request: {}

    monkeypatch.setattr(worker, "_stock", make)
    talk({**SETTINGS, "threads": 3})
    assert order == [3, "built"]
    order.clear()
    talk(SETTINGS)
    assert order == ["built"]


def test_the_stock_arm_never_loads_the_engine(tiny_folder: Any) -> None:
    """Its peak memory and its speed are those of transformers alone."""
    code = (
        "import json, sys\n"
        "from draftproof.bench import worker\n"
        "decode = worker._stock(json.loads(sys.argv[1]))\n"
        "made = decode({'prompt_ids': [5, 6, 7], 'max_new_tokens': 4, 'options': {}})\n"
        "print(json.dumps([made, sorted(m for m in sys.modules if m.startswith('draftproof'))]))"
    )
    folder = tiny_folder("llama")
    settings = json.dumps({**SETTINGS, "folder": str(folder)})
    done = subprocess.run(
        [sys.executable, "-c", code, settings], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made, loaded = json.loads(done.stdout)
    assert len(made["token_ids"]) == 4
    assert made["num_forwards"] == 3  # after the prompt's
    assert "draftproof.models.stock" in loaded
    for name in ("engine", "decode", "verify", "depth", "probe", "plans", "drafters", "drafters.build"):
        assert f"draftproof.{name}" not in loaded


@pytest.mark.slow
def test_both_arms_emit_stocks_ids(
    tiny_folder: Any, talk: Conversation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path))
    folder = tiny_folder("llama", torch.bfloat16)
    stock_model = StockModel(folder, torch.bfloat16, torch.device("cpu"))
    want = list(stock_model.generate(PROMPT, 24))
    settings = {"folder": str(folder), "dtype": "bfloat16", "threads": 1, "draft_model": str(folder)}
    requests = [
        {**REQUEST, "drafter": drafter, "depth": depth}
        for drafter, depth in (("none", "auto"), ("auto", "auto"), ("lookup", 4), ("early_exit", 2))
    ]
    alone = {**REQUEST, "drafter": "draft_model", "depth": 5, "max_new_tokens": 25}
    num_threads = torch.get_num_threads()
    try:
        _, stock = talk({**SETTINGS, **settings}, {**REQUEST, "drafter": None, "depth": None})
        _, *own, drafted = talk({**ENGINE, **settings}, *requests[:2], alone)
        no_model = {**settings, "draft_model": None}
        _, *others, refused = talk({**ENGINE, **no_model}, *requests[2:], {**REQUEST, "depth": -1})
        own += others
    finally:
        torch.set_num_threads(num_threads)
    assert stock["token_ids"] == want
    assert "trace" not in stock
    assert stock["num_forwards"] == 23
    assert own[0]["num_forwards"] == 23
    for answer in own:
        assert answer["token_ids"] == want
        trace = decode(Trace, answer["trace"])
        assert list(trace.token_ids) == want
        # The early exit's own forwards, of a cut target, are not among them.
        assert answer["num_forwards"] == decode_stats(trace).steps
    assert own[2]["num_forwards"] < 23, "lookup drafts on such a prompt"
    # The model drafts for itself: settings named it, and it is always right.
    rounds = decode(Trace, drafted["trace"]).rounds[1:]
    assert [r.num_accepted for r in rounds] == [5, 5, 5, 5]
    assert drafted["num_forwards"] == 4
    assert refused["error"] == "depth must be 0 or more, got -1"


def test_it_runs_as_a_program(tiny_folder: Any) -> None:
    """``python -m draftproof.bench.worker`` with a pipe on either side; ends when its input ends."""
    messages = [{**SETTINGS, "folder": str(tiny_folder("llama")), "threads": 1}, {**REQUEST, "drafter": None}]
    done = subprocess.run(
        [sys.executable, "-m", "draftproof.bench.worker"],
        input="".join(json.dumps(m) + "\n" for m in messages),
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told, answer = map(json.loads, done.stdout.splitlines())
    assert told["machine"]["num_threads"] == 1
    assert len(answer["token_ids"]) == 24
    assert answer["num_forwards"] == 23
    assert answer["peak_bytes"] > 10 << 20
    assert answer["peak_cuda_bytes"] is None
