"""One arm of a comparison in a process of its own: ``python -m draftproof.bench.worker``.

The parent sends one JSON object a line: first the arm's settings, then one request a decode. The answer
holds plain ids and the process's peak resident memory. The parent owns the clock; nothing is cached between
requests but weights, plan and cost curve. A failed request answers with its reason and the worker lives on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.record import Trace

Request = dict[str, Any]
Decode = Callable[[Request], dict[str, Any]]


def _stock(settings: Request) -> Decode:
    """Pristine transformers: no code of the engine is imported."""
    import torch

    from draftproof.models.load import DTYPES
    from draftproof.models.stock import StockModel

    model = StockModel(Path(settings["folder"]), DTYPES[settings["dtype"]], torch.device(settings["device"]))
    counter = Counter()
    model.module.register_forward_pre_hook(lambda *_: counter.add())

    def decode(request: Request) -> dict[str, Any]:
        counter.num_calls = 0
        ids = model.generate(request["prompt_ids"], request["max_new_tokens"], **request["options"])
        return {"token_ids": ids, "num_forwards": counter.num_calls - 1}

    return decode


def _engine(settings: Request) -> Decode:
    from draftproof.wire import encode

    _, run = open_engine(settings)

    def decode(request: Request) -> dict[str, Any]:
        done = run(
            request["prompt_ids"], max_new_tokens=request["max_new_tokens"], drafter=request["drafter"],
            depth=request["depth"], **request["options"],
        )  # fmt: skip
        return {
            "token_ids": done.trace.token_ids, "trace": encode(done.trace), "num_forwards": done.num_forwards
        }  # fmt: skip

    return decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """A decode's trace, and the verifications its sessions really ran."""

    trace: Trace
    num_forwards: int


def open_engine(settings: Request) -> tuple[Any, Callable[..., Counted]]:
    """The engine, and its ``decode`` with every forward counted: one arm for benches and evaluations."""
    from draftproof import engine as engines
    from draftproof.drafters.shortlist import read_shortlist

    load = {key: settings[key] for key in ("dtype", "device", "claim")}
    engine = engines.load(settings["folder"], head=settings.get("head"), **load)
    draft_model = None
    if settings["draft_model"] is not None:
        draft_model = engines.load_target(
            settings["draft_model"], dtype=settings["dtype"], device=settings["device"], like=engine
        )
    listed = settings.get("shortlist")
    shortlist = None if listed is None else read_shortlist(Path(listed))
    counter = Counter()
    engine.target.open = counting(engine.target.open, counter)  # type: ignore[assignment, method-assign]

    def run(prompt_ids: Sequence[int], **options: Any) -> Counted:
        counter.num_calls = 0
        trace = engine.decode(
            prompt_ids,
            draft_model=draft_model,
            exit_layer=settings["exit_layer"],
            shortlist=shortlist,
            **options,
        )
        return Counted(trace=trace, num_forwards=counter.num_calls)

    return engine, run


class Counter:
    """Forwards of the target since it was last set to zero."""

    def __init__(self) -> None:
        self.num_calls = 0

    def add(self) -> None:
        """One more."""
        self.num_calls += 1


def counting(open_session: Callable[[int], Any], counter: Counter) -> Callable[[int], Any]:
    """``open_session`` with every verification of its sessions counted, whoever calls it."""

    def opened(capacity: int) -> Any:
        session = open_session(capacity)
        verify = session.verify

        def counted(token_ids: Any) -> Any:
            counter.add()
            return verify(token_ids)

        session.verify = counted
        return session

    return opened


def serve() -> None:
    """Answer requests until standard input closes."""
    settings = json.loads(sys.stdin.readline())
    import torch
    from transformers.utils import logging

    from draftproof.errors import UsageError
    from draftproof.machine import describe
    from draftproof.wire import encode

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    device = torch.device(settings["device"])
    try:
        decode = (_stock if settings["kind"] == "stock" else _engine)(settings)
    except UsageError as error:
        _answer({"error": str(error)})
        return
    _answer({"machine": encode(describe(device))})
    for line in sys.stdin:
        _answer(_measured(decode, json.loads(line), device))


def _measured(decode: Decode, request: Request, device: Any) -> dict[str, Any]:
    """One answer with the peak memory of this request alone, where the system can reset the peak."""
    from draftproof.errors import UsageError
    from draftproof.machine import peak_bytes, peak_cuda_bytes, reset_peaks

    reset_peaks(device)
    try:
        reply = decode(request)
    except UsageError as error:
        reply = {"error": str(error)}
    return {**reply, "peak_bytes": peak_bytes(), "peak_cuda_bytes": peak_cuda_bytes(device)}


def _answer(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve()
