"""``pair`` and ``make_pair``: a tiny model as a row-exact target and as stock, and how the two compare."""

from __future__ import annotations

import inspect
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from draftproof.clock import RealClock
from draftproof.models.decoder import DecoderTarget
from draftproof.models.load import load_decoder, read_config, refusal
from draftproof.models.stock import SerialRun, StockModel
from draftproof.plans import PlanRequest, PlanStore, ProbeShapes
from draftproof.record import Plan

CPU = torch.device("cpu")
NUM_STEPS = 17


@dataclass
class Pair:
    """One model twice. Prompts and stock's runs are the same for every comparison."""

    target: DecoderTarget
    stock: StockModel
    plan: Plan
    folder: Path
    runs: dict[int, SerialRun] = field(default_factory=dict)

    def prompt(self, length: int) -> list[int]:
        return [(7 * i * i + 3 * i + length) % self.target.vocab_size for i in range(length)]

    def run(self, length: int) -> SerialRun:
        if length not in self.runs:
            run = self.stock.run(self.prompt(length), NUM_STEPS)
            assert len(run.token_ids) == len(run.logits_NV) == NUM_STEPS
            self.runs[length] = run
        return self.runs[length]

    def num_changes(self, length: int) -> int:
        """How often the token changes along the text: a constant one would prove little."""
        tokens = self.run(length).token_ids
        return sum(a != b for a, b in zip(tokens, tokens[1:], strict=False))

    def differences(self, length: int, num_rows: int) -> list[int]:
        """Steps whose logits are not stock's, fed ``num_rows`` tokens a verification; 0 is the prompt's."""
        run, session = self.run(length), self.target.open(length + NUM_STEPS + num_rows)
        got = [session.prefill(self.prompt(length))[None]]
        for start in range(0, NUM_STEPS - 1, num_rows):
            chunk = run.token_ids[start : min(start + num_rows, NUM_STEPS - 1)]
            got.append(session.verify(chunk))
            session.commit(len(chunk))
        return _unequal_rows(torch.cat(got), run.logits_NV)

    def differences_after_wrong_drafts(self, length: int, seed: int) -> list[int]:
        """The same, where most verifications end in wrong tokens, and some are dropped whole."""
        rng = random.Random(seed)
        run, session = self.run(length), self.target.open(length + NUM_STEPS + 16)
        got = [session.prefill(self.prompt(length))]
        while len(got) < NUM_STEPS:
            done = len(got) - 1
            right = run.token_ids[done : done + rng.randint(0, min(6, NUM_STEPS - 1 - done))]
            wrong = [rng.randrange(self.target.vocab_size) for _ in range(rng.randint(0, 8))]
            if not right and not wrong:
                continue
            logits = session.verify([*right, *wrong])
            session.commit(len(right))
            got.extend(logits[: len(right)])
        return _unequal_rows(torch.stack(got), run.logits_NV)


def _unequal_rows(got: Tensor, want: Tensor) -> list[int]:
    assert got.shape == want.shape
    assert want.dtype == torch.float32  # stock converts the logits it returns, which is exact
    return [i for i in range(len(want)) if not torch.equal(got[i].float(), want[i])]


def _make_pair(folder: Path, dtype: torch.dtype, claim: Any) -> Pair:
    config = read_config(folder)
    assert refusal(config) is None
    store, request = PlanStore(CPU, RealClock()), PlanRequest(claim=claim, dtype=dtype, device=CPU)
    store.probe(ProbeShapes.of(config, request), lambda *_: None)  # here: a child would take seconds to start
    plan = store.plan(config, request)
    target = load_decoder(folder, config, plan, dtype=dtype, device=CPU)
    return Pair(target, StockModel(folder, dtype, CPU), plan, folder)


@pytest.fixture(scope="session")
def pair(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    """``pair(kind, dtype, claim="bitwise", **config)``, made once a session."""
    made: dict[str, Pair] = {}
    folder = tmp_path_factory.mktemp("plans")

    def make(kind: str, dtype: torch.dtype, claim: str = "bitwise", **config: Any) -> Pair:
        key = f"{kind} {dtype} {claim} {sorted(config.items())}"
        if key not in made:
            # Not for the whole session: other tests look for the pulled model.
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DRAFTPROOF_CACHE", str(folder))
                made[key] = _make_pair(tiny_folder(kind, dtype, **config), dtype, claim)
        return made[key]

    return make


@pytest.fixture
def make_pair(scratch_cache: Path) -> Callable[..., Pair]:
    """``make_pair(folder, dtype, claim)``, with plans of its own."""
    return _make_pair


@pytest.fixture
def stepper() -> Callable[[Any], Callable[[Sequence[int]], Tensor]]:
    """``stepper(module)(ids)``: feed ids as stock does, the prompt first; logits ``[1, V]`` after them."""

    def start(module: Any) -> Callable[[Sequence[int]], Tensor]:
        # The two names this argument has had.
        name = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"
        fixed = {name: DynamicCache(config=module.config), "use_cache": True, "logits_to_keep": 1}

        @torch.inference_mode()
        def step(ids: Sequence[int]) -> Tensor:
            logits: Tensor = module(torch.tensor([list(ids)]), **fixed).logits[0]
            return logits[-1:]

        return step

    return start


@pytest.fixture
def feed(stepper: Callable[..., Any]) -> Callable[..., Tensor]:
    """``feed(module, prompt, tokens)``: logits after the prompt and after each token."""

    def run(module: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        step = stepper(module)
        return torch.cat([step(prompt), *(step([token]) for token in tokens)])

    return run


@pytest.fixture
def shifted_folder(tmp_path: Path) -> Callable[[Path, int], Path]:
    """``shifted_folder(folder, n)``: a copy whose weights begin ``n`` bytes past a multiple of 16.

    One-row fp32 kernels choose their path by the weight's address, and stock computes in the mapped file.
    """

    def make(folder: Path, offset: int) -> Path:
        copy = tmp_path / f"shifted-{offset}"
        shutil.copytree(folder, copy)
        data = (copy / "model.safetensors").read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.dumps(json.loads(data[8 : 8 + length])).encode()
        header += b" " * ((offset - 8 - len(header)) % 16)
        (copy / "model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + data[8 + length :]
        )
        return copy

    return make
