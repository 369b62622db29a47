"""The judged process: ``python -m draftproof.bench.candidate``, for a candidate and for the pristine control.

The judge sends one JSON object a line: settings, then one request a run, holding plain ids and nothing that
tells which input they are. Both arms run this file; the control has no transform. The answers leave through
a private descriptor, so what a candidate prints cannot disturb them (it appears on stderr). Everything this
process says of itself is the candidate's word: it can replace any of these objects. Time, comparison and
verdict are the judge's.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import torch
from transformers.utils import logging

from draftproof import stats
from draftproof.bench import quality
from draftproof.bench.workloads.base import Inputs, Workload, as_output
from draftproof.bench.workloads.build import build_workload
from draftproof.clock import RealClock
from draftproof.errors import UsageError
from draftproof.machine import describe, memory_floor, peak_bytes, peak_cuda_bytes, reset_peaks
from draftproof.wire import encode

Message = dict[str, Any]
Run = Callable[[Message], Message]

_MODULE_NAME = "draftproof_candidate_file"
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


class ForwardCounter:
    """Counts forwards after the prompt's, by a hook that was there before the candidate.

    The prompt's forwards are the first one and those after it that still feed rows of the prompt, until one
    feeds a single row. A loop that replays a graph or calls ``forward`` directly is not seen.
    """

    def __init__(self, module: Any) -> None:
        self._num_calls = self._num_rows = self._num_prompt = self._num_forwards = 0
        self._is_prompt = True
        module.register_forward_pre_hook(self._see, with_kwargs=True)

    def start(self, num_prompt: int) -> None:
        """A new run over a prompt of ``num_prompt`` ids."""
        self._num_calls = self._num_rows = self._num_forwards = 0
        self._num_prompt, self._is_prompt = num_prompt, True

    @property
    def num_forwards(self) -> int | None:
        """Forwards after the prompt's; ``None`` when no forward was seen at all."""
        return self._num_forwards if self._num_calls else None

    def _see(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        num_rows = _num_rows(args, kwargs)
        self._num_calls += 1
        self._num_forwards += not self._is_prompt
        self._num_rows += num_rows
        self._is_prompt = self._is_prompt and num_rows > 1 and self._num_rows < self._num_prompt


def _num_rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Rows of the first tensor of ids or hidden rows, ``[1, T]`` or ``[1, T, D]``; 1 where none is found."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            return int(value.shape[1])
    return 1


def _workload(settings: Message) -> tuple[Run, Message]:
    """A workload, changed by the transform where there is one."""
    workload = build_workload(settings["workload"], settings["options"])
    workload.load()
    counter = ForwardCounter(workload.counted_module())
    score = _scorer(workload)
    ready: Message = {}
    if settings["transform"] is None:
        num_bytes = weights_read(workload.model) if settings["workload"] == "llm" else None
        if num_bytes is not None:
            device = torch.device(settings["device"])
            ready["memory_floor"] = encode(memory_floor(num_bytes, device, RealClock()))
    else:
        apply_transform(workload, Path(settings["transform"]), settings["sha256"])

    def run(request: Message) -> Message:
        if "score" in request:
            return {"score": score(request)}
        inputs = Inputs(token_ids=tuple(request["prompt_ids"]), max_new_tokens=request["max_new_tokens"])
        Workload.take_stats(workload)
        counter.start(len(inputs.token_ids))
        with torch.no_grad():
            output = as_output(workload.run(inputs))
        counters = Workload.take_stats(workload)
        return {
            **output.to_json(), "counters": asdict(counters) if counters else None,
            "num_forwards": counter.num_forwards,
        }  # fmt: skip

    return run, ready


def _scorer(workload: Workload) -> Callable[[Message], Any]:
    """Answers for the quality gates, by the model's plain forward."""

    def score(request: Message) -> Any:
        prompt_ids, token_ids = request["prompt_ids"], request["token_ids"]
        if request["score"] == "reference":
            return quality.reference(workload.model, prompt_ids, len(token_ids), token_ids)
        if request["score"] == "own_nll":
            return quality.own_nll(workload.model, prompt_ids, token_ids)
        return quality.forward_logprobs(workload.model, prompt_ids, token_ids, request["top_ids"])

    return score


def weights_read(model: Any) -> int | None:
    """Bytes of weights that every forward must read; ``None`` where experts make that unknown.

    The input embedding counts only where it is the output's too: a forward reads single rows of it.
    """
    named = {id(p): p for p in model.parameters()}
    if any("expert" in name for name, _ in model.named_parameters()):
        return None
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    is_tied = head is not None and embedding is not None and head.weight is embedding.weight
    if embedding is not None and not is_tied:
        named.pop(id(embedding.weight), None)
    return int(sum(p.nbytes for p in named.values()))


def apply_transform(workload: Workload, path: Path, sha256: str) -> None:
    """Execute the candidate's file, exactly the bytes the judge has read, and call its ``apply``.

    Raises:
        UsageError: the file was changed or defines no ``apply``.
    """
    source = path.read_bytes()
    if hashlib.sha256(source).hexdigest() != sha256:
        raise UsageError(f"{path} was changed while it was being evaluated; run again")
    module = ModuleType(_MODULE_NAME)
    module.__file__ = str(path)
    sys.modules[_MODULE_NAME] = module
    sys.path.insert(0, str(path.parent))
    _candidates_own(lambda: exec(compile(source, str(path), "exec"), module.__dict__))  # noqa: S102
    apply = getattr(module, "apply", None)
    if not callable(apply):
        raise UsageError(f"{path} defines no function apply(workload)")
    _candidates_own(lambda: apply(workload))


def _candidates_own(call: Callable[[], Any]) -> None:
    """Run the candidate's code; a ``UsageError`` out of it is its failure, not wrong use of ours."""
    try:
        call()
    except UsageError as error:
        raise RuntimeError(str(error)) from error


def _engine(settings: Message) -> tuple[Run, Message]:
    """A built-in drafter, run by the engine as a bench runs it."""
    from draftproof.bench.worker import open_engine  # noqa: PLC0415 - the control never loads the engine

    engine, decode = open_engine({**settings, "folder": settings["model"]})

    def run(request: Message) -> Message:
        length = request["max_new_tokens"]
        done = decode(
            request["prompt_ids"], max_new_tokens=length,
            drafter="none" if request.get("is_plain") else settings["drafter"],
            depth=settings["depth"],
            **({"min_new_tokens": length} if settings["stop"] == "fixed" else {}),
        )  # fmt: skip
        return {
            "token_ids": list(done.trace.token_ids), "counters": asdict(stats.own_counters(done.trace)),
            "trace": encode(done.trace), "num_forwards": done.num_forwards,
        }  # fmt: skip

    return run, {"plan": encode(engine.plan), "cost_curve": encode(engine.curve)}


def serve(requests: TextIO, answers: TextIO) -> None:
    """Load what the first line asks for, say so, then answer requests until the stream ends."""
    settings = json.loads(requests.readline())
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    device = torch.device(settings["device"])

    def answer(message: Message) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        run, ready = (_engine if settings["kind"] == "engine" else _workload)(settings)
    except UsageError as error:
        answer({"refused": str(error)})
        return
    except Exception as error:  # noqa: BLE001 - a candidate may raise anything
        answer({"failure": failure(error)})
        return
    answer({"machine": encode(describe(device)), **ready})
    for line in requests:
        request = json.loads(line)
        reset_peaks(device)
        try:
            reply = run(request)
        except Exception as error:  # noqa: BLE001 - a candidate may raise anything
            reply = {"failure": failure(error)}
        peaks = {"peak_bytes": peak_bytes(), "peak_cuda_bytes": peak_cuda_bytes(device)}
        answer({"id": request["id"], **reply, **peaks})


def failure(error: Exception) -> Message:
    """``error`` or ``oom`` with a one-line reason; the traceback goes to stderr."""
    traceback.print_exception(error)
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - also an error's own text is the candidate's code
        text = ""
    name = type(error).__name__
    is_memory = isinstance(error, MemoryError) or name == "OutOfMemoryError"
    is_memory = is_memory or any(sign in text.lower() for sign in _OUT_OF_MEMORY)
    return {"kind": "oom" if is_memory else "error", "reason": f"{name}: {text}" if text else name}


def private_streams() -> tuple[TextIO, TextIO]:
    """Copies of standard input and output that only this file knows; the old ones lead elsewhere.

    Standard output becomes stderr, standard input empty. Children of this process inherit neither copy.
    """
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return requests, answers


def end_with_the_judge() -> None:
    """Ask Linux to end this process when the judge dies: it may be stopped then and see no end of input."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Serve the judge that started this process."""
    end_with_the_judge()
    streams = private_streams()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    serve(*streams)


if __name__ == "__main__":
    main()
