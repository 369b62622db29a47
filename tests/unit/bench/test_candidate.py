"""The judged process from inside: settings, counted forwards, counters, failures, its private streams."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.bench import candidate
from draftproof.bench.candidate import ForwardCounter, apply_transform, failure, serve, weights_read
from draftproof.bench.workloads.llm import LLMWorkload
from draftproof.errors import UsageError
from draftproof.models.stock import StockModel
from draftproof.record import CostCurve, Machine, MemoryFloor, Plan, Trace
from draftproof.wire import decode

PROMPT = list(b"the other, the other, the")
Folder = Callable[..., Path]
Message = dict[str, Any]


def settings(folder: Path, transform: Path | None = None, **more: Any) -> Message:
    sha256 = hashlib.sha256(transform.read_bytes()).hexdigest() if transform else None
    return {
        "kind": "workload", "workload": "llm", "options": {"model": str(folder), "dtype": "float32"},
        "threads": None, "device": "cpu", "transform": str(transform) if transform else None,
        "sha256": sha256, **more,
    }  # fmt: skip


def engine(folder: Path, **more: Any) -> Message:
    return settings(folder) | {
        "kind": "engine", "model": str(folder), "dtype": "float32", "claim": "auto", "stop": "fixed",
        "drafter": "lookup", "depth": 4, "draft_model": None, "exit_layer": None, **more,
    }  # fmt: skip


def request(**more: Any) -> Message:
    return {"id": "7f", "prompt_ids": PROMPT, "max_new_tokens": 12, **more}


def talk(*messages: Message) -> list[Message]:
    requests, answers = io.StringIO("".join(json.dumps(m) + "\n" for m in messages)), io.StringIO()
    serve(requests, answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def transform(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "made.py"
    path.write_text(body)
    return path


@pytest.fixture(scope="module")
def expected(tiny_folder: Folder) -> list[int]:
    return list(StockModel(tiny_folder("llama"), torch.float32, torch.device("cpu")).generate(PROMPT, 12))


def test_the_control_answers_what_stock_emits_and_every_forward_is_counted(
    tiny_folder: Folder, expected: list[int]
) -> None:
    ready, first, again = talk(settings(tiny_folder("llama")), request(), request(id="80"))
    assert decode(Machine, ready["machine"]).device == "cpu"
    weights = StockModel(tiny_folder("llama"), torch.float32, torch.device("cpu")).module
    floor = decode(MemoryFloor, ready["memory_floor"])
    assert floor.num_bytes == sum(p.nbytes for p in weights.parameters()) - 288 * 64 * 4
    for answer, number in ((first, "7f"), (again, "80")):
        assert answer["id"] == number
        assert answer["token_ids"] == expected
        assert answer["num_forwards"] == 11
        assert answer["counters"] is None
        assert answer["peak_bytes"] > 10 << 20
        assert answer["peak_cuda_bytes"] is None


def test_a_transform_is_applied_and_its_counters_start_from_zero_in_every_run(
    tiny_folder: Folder, tmp_path: Path, expected: list[int]
) -> None:
    path = transform(
        tmp_path,
        "def apply(workload):\n"
        "    workload.report_stats(steps=100)\n"
        "    stock = workload.run\n"
        "    def run(inputs):\n"
        "        workload.report_stats(steps=11, tokens=11)\n"
        "        return stock(inputs)\n"
        "    workload.run = run\n",
    )
    ready, *answers = talk(settings(tiny_folder("llama"), path), request(), request())
    assert "memory_floor" not in ready
    for answer in answers:
        assert answer["token_ids"] == expected
        assert answer["counters"] == {"steps": 11, "verifies": 0, "drafted": 0, "accepted": 0, "tokens": 11}


def test_a_failed_run_answers_with_its_reason_and_the_next_one_is_served(
    tiny_folder: Folder, tmp_path: Path, expected: list[int]
) -> None:
    path = transform(
        tmp_path,
        "def apply(workload):\n"
        "    stock, calls = workload.run, []\n"
        "    def run(inputs):\n"
        "        calls.append(1)\n"
        "        workload.report_stats(steps=-1 if len(calls) == 1 else 1)\n"
        "        return stock(inputs)\n"
        "    workload.run = run\n",
    )
    _, failed, served = talk(settings(tiny_folder("llama"), path), request(), request())
    assert failed["failure"]["kind"] == "error"
    assert failed["failure"]["reason"] == "UsageError: report_stats: steps must be 0 or more, got -1"
    assert served["token_ids"] == expected


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ("x = 1\n", "defines no function apply"),
        ("apply = 3\n", "defines no function apply"),
    ],
)
def test_a_file_without_apply_is_refused(body: str, answer: str, tiny_folder: Folder, tmp_path: Path) -> None:
    (only,) = talk(settings(tiny_folder("llama"), transform(tmp_path, body)), request())
    assert answer in only["refused"]


def test_errors_of_the_candidates_file_are_its_failures(tiny_folder: Folder, tmp_path: Path) -> None:
    body = "from draftproof.errors import UsageError\ndef apply(workload):\n    raise UsageError('mine')\n"
    (only,) = talk(settings(tiny_folder("llama"), transform(tmp_path, body)), request())
    assert only == {"failure": {"kind": "error", "reason": "RuntimeError: mine"}}
    (only,) = talk(settings(tiny_folder("llama"), transform(tmp_path, "1 / 0\n")), request())
    assert only["failure"]["reason"] == "ZeroDivisionError: division by zero"


def test_an_unusable_model_is_refused(tmp_path: Path) -> None:
    (only,) = talk(settings(tmp_path), request())
    assert only["refused"] == f"{tmp_path} has no config.json: not a model folder"


def test_another_file_than_the_judge_read_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    path = transform(tmp_path, "def apply(workload): pass\n")
    with pytest.raises(UsageError, match="was changed while it was being evaluated"):
        apply_transform(LLMWorkload(model="m"), path, "0" * 64)


def test_a_transform_may_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "draftproof_neighbour.py").write_text("def name(): return 'next door'\n")
    path = transform(
        tmp_path,
        "import draftproof_neighbour as n\ndef apply(workload): workload.seen = n.name(), __file__\n",
    )
    workload = LLMWorkload(model="m")
    apply_transform(workload, path, hashlib.sha256(path.read_bytes()).hexdigest())
    assert workload.seen == ("next door", str(path))  # type: ignore[attr-defined]


@pytest.mark.parametrize("drafter", ["lookup", "none"])
def test_a_built_in_drafter_answers_with_its_trace(
    drafter: str, tiny_folder: Folder, expected: list[int], scratch_cache: Path
) -> None:
    ready, answer = talk(engine(tiny_folder("llama"), drafter=drafter), request())
    assert decode(Plan, ready["plan"]).dtype
    assert decode(CostCurve, ready["cost_curve"]).rows[0] == 1
    trace = decode(Trace, answer["trace"])
    assert list(trace.token_ids) == answer["token_ids"] == expected
    assert answer["counters"]["tokens"] == 11
    assert answer["counters"]["steps"] == answer["num_forwards"]
    assert (answer["counters"]["drafted"] > 0) is (drafter == "lookup")


def test_a_bad_drafter_fails_its_run(tiny_folder: Folder, scratch_cache: Path) -> None:
    _, answer = talk(engine(tiny_folder("llama"), drafter="early_exit", exit_layer=99), request())
    assert answer["failure"]["kind"] == "error"
    assert "--exit-layer must be" in answer["failure"]["reason"]


def test_the_gates_are_answered_by_the_plain_forward(tiny_folder: Folder, expected: list[int]) -> None:
    asked = {"prompt_ids": PROMPT, "token_ids": expected[:4]}
    _, reference = talk(settings(tiny_folder("llama")), {"id": "1", "score": "reference", **asked})
    found = reference["score"]
    assert found["token_ids"] == expected[:4]
    assert [row[0] for row in found["top_ids"]] == expected[:4]
    _, forward, nll = talk(
        settings(tiny_folder("llama")),
        {"id": "1", "score": "forward", "top_ids": found["top_ids"], **asked},
        {"id": "2", "score": "own_nll", **asked},
    )
    assert forward["score"]["top_logprobs"] == found["top_logprobs"]
    assert nll["score"] == found["nll"]


def rows(num: int) -> torch.Tensor:
    return torch.zeros(1, num, 4)


def count(num_prompt: int, *feeds: int) -> int | None:
    layer = torch.nn.Identity()
    counter = ForwardCounter(layer)
    for _ in range(2):  # the second run starts from zero
        counter.start(num_prompt)
        for num in feeds:
            layer(rows(num))
    return counter.num_forwards


@pytest.mark.parametrize(
    ("num_prompt", "feeds", "num"),
    [
        (10, (10, 1, 1, 1), 3),
        (10, (10,), 0),
        (10, (4, 4, 2, 1, 5), 2),  # the prompt in pieces
        (9, (4, 4, 1, 1), 1),  # its last piece is a single row
        (10, (13, 4), 1),  # drafts behind the prompt
        (10, (1, 1, 1), 2),  # a prompt known from before
        (10, (), None),
    ],
)
def test_forwards_after_the_prompts_are_counted(
    num_prompt: int, feeds: tuple[int, ...], num: int | None
) -> None:
    assert count(num_prompt, *feeds) == num


def test_rows_are_found_wherever_the_tensor_is() -> None:
    ids, hidden = torch.zeros(1, 3, dtype=torch.long), rows(5)
    assert candidate._num_rows((ids,), {}) == 3
    assert candidate._num_rows((), {"position": 4, "hidden_states": hidden}) == 5
    assert candidate._num_rows((None,), {"mask": torch.zeros(7)}) == 1


def test_weights_read_leaves_out_an_embedding_of_its_own_and_gives_up_on_experts(tiny_folder: Folder) -> None:
    for tied in (False, True):
        folder = tiny_folder("llama", tie_word_embeddings=tied)
        module = StockModel(folder, torch.float32, torch.device("cpu")).module
        total = sum(p.nbytes for p in module.parameters())
        assert weights_read(module) == (total if tied else total - 288 * 64 * 4)
    assert weights_read(torch.nn.ModuleDict({"experts": torch.nn.Linear(2, 2)})) is None
    assert weights_read(torch.nn.Linear(2, 2, bias=False)) == 16


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (ValueError("a\nb"), "error", "ValueError: a b"),
        (ValueError(), "error", "ValueError"),
        (MemoryError(), "oom", "MemoryError"),
        (torch.OutOfMemoryError("CUDA"), "oom", "OutOfMemoryError: CUDA"),
        (RuntimeError("CUDA error: out of memory"), "oom", "RuntimeError: CUDA error: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: x"), "oom", None),
        (MuteError(), "error", "MuteError"),
    ],
)
def test_failures_have_a_kind_and_one_line(
    error: Exception, kind: str, reason: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    found = failure(error)
    assert found["kind"] == kind
    assert reason is None or found["reason"] == reason
    assert type(error).__name__ in capfd.readouterr().err


def test_the_old_streams_lead_elsewhere() -> None:
    code = (
        "import os, sys\n"
        "from draftproof.bench.candidate import private_streams\n"
        "requests, answers = private_streams()\n"
        "print('printed', repr(sys.stdin.read()), flush=True)\n"
        "os.system('echo by a child')\n"
        "answers.write('answer to ' + requests.readline())\n"
        "answers.flush()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input="me\n", capture_output=True, text=True, check=True
    )
    assert done.stdout == "answer to me\n"
    assert done.stderr == "printed ''\nby a child\n"
