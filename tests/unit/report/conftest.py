"""A run as a bench leaves it: twelve texts, five pairs, a cascade of drafters, and what follows from it.

The texts are the suite's own: the first part is the prompt, what follows is the "output". Rounds, times and
memory are drawn from a seeded generator so that speeds follow from the cost curve. ``results`` is computed by
``results.compute``, so the sample has the format that is published.

``make_evidence(**changes)`` makes a run, ``make_results(evidence)`` its figures, ``evidence``, ``results``,
``audit`` and ``margins`` are those of the honest one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest

from draftproof import results as published
from draftproof.folder import Decode, Evidence
from draftproof.record import (
    CostCurve,
    Counters,
    Leg,
    Machine,
    MemoryFloor,
    OpEvidence,
    Plan,
    Round,
    Trace,
)
from draftproof.wire import tokens_sha256

LABELS = (
    "news", "dialogue", "code", "recipe", "poem", "question", "maths", "table", "german", "french", "spanish",
    "chinese",
)  # fmt: skip
NUM_TOKENS, NUM_PAIRS = 192, 5
# How often a draft token is right, by label: what makes the speed depend on the text.
LUCK = dict(zip(LABELS, (0.45, 0.72, 0.66, 0.7, 0.62, 0.55, 0.6, 0.9, 0.58, 0.68, 0.7, 0.5), strict=True))
SOURCES = ("suffix", "lookup", "draft_model")
CURVE = CostCurve(
    rows=(1, 2, 4, 8, 16), contexts=(128, 512, 1024),
    seconds=((0.0220, 0.0232, 0.0251, 0.0289, 0.0372), (0.0229, 0.0243, 0.0268, 0.0316, 0.0421),
             (0.0241, 0.0259, 0.0290, 0.0353, 0.0489)),
)  # fmt: skip
MACHINE = Machine(
    cpu="AMD EPYC (family 26 model 2)", isa="AVX512-BF16", num_threads=2, device="cpu", os="Linux 6.12",
    python="3.12.11", torch="2.13.0+cpu", transformers="5.24.0", environment=("OMP_NUM_THREADS=2",),
)  # fmt: skip
PLAN = Plan(
    claim="bitwise", dtype="bfloat16", fingerprint="b41f8a3c77d0", max_rows=16,
    ops=(
        OpEvidence(op="qkv", shape=(960, 576), form="prepacked linear", max_rows=32, is_exact=True,
                   num_checked=4096, rejected={}),
        OpEvidence(op="attention", shape=(9, 3, 64), form="row by row", max_rows=1, is_exact=False,
                   num_checked=512, rejected={"one call": "row 1 of 4 differs"}),
    ),
)  # fmt: skip


def _split(text: str) -> list[str]:
    """Word-like pieces; a character of two or more bytes now and then comes in two, as byte tokens do."""
    pieces = re.findall(r" ?[^\W\d_]{1,6}| ?\d| ?[^\w\s]+|\s", text)
    out: list[str] = []
    for index, piece in enumerate(pieces):
        out += ["", piece] if len(piece.encode()) > len(piece) and index % 9 == 0 else [piece]
    return out


def _text(label: str) -> dict[str, Any]:
    text = (files("draftproof.bench") / "texts" / f"{label}.txt").read_text(encoding="utf-8")
    half = len(text) // 3
    pieces = (_split(text[half:]) * 4)[:NUM_TOKENS]
    return {"prompt": text[:half], "pieces": pieces}


def _ids(pieces: Sequence[str]) -> tuple[int, ...]:
    return tuple(sum(piece.encode()) % 49152 + index % 3 for index, piece in enumerate(pieces))


def _trace(label: str, ids: tuple[int, ...], num_prompt: int, draw: random.Random) -> Trace:
    luck = LUCK[label]
    rounds = [Round(index=0, position=num_prompt, source="none", num_offered=0, num_drafted=0, num_accepted=0,
                    emitted=ids[:1], reason="prompt")]  # fmt: skip
    done = 1
    while done < len(ids):
        left = len(ids) - done
        depth = min(draw.choice((0, 2, 3, 4, 4, 6, 8)), left - 1)
        offered = min(depth + draw.choice((0, 0, 2)), left - 1)
        right = next((i for i in range(depth) if draw.random() > luck), depth)
        drafted = [*ids[done : done + right], *([7] if right < offered else [])]
        drafted += list(ids[done + right + 1 : done + offered])
        emitted = ids[done : done + right + 1]
        cost = CURVE.at(depth + 1, num_prompt + done) * draw.uniform(0.99, 1.06)
        rounds.append(Round(
            index=len(rounds), position=num_prompt + done,
            source=draw.choice(SOURCES) if depth else "none", num_offered=offered, num_drafted=depth,
            num_accepted=right, emitted=emitted, offered=tuple(drafted[:offered]),
            reason="expected gain" if depth else "no draft pays", draft_ns=int(3e5 + 2e5 * depth),
            verify_ns=int(cost * 1e9), commit_ns=150_000, num_redecided=1 if draw.random() < 0.01 else 0,
        ))  # fmt: skip
        done += len(emitted)
    return Trace(num_prompt=num_prompt, prefill_ns=310_000_000, rounds=tuple(rounds))


def _seconds(arm: str, trace: Trace) -> float:
    tokens = len(trace.token_ids)
    if arm == "stock":
        return 0.31 + 0.0400 * tokens
    if arm == "serial":
        return 0.31 + 0.0236 * tokens
    return 0.31 + sum(r.draft_ns + r.verify_ns + r.commit_ns for r in trace.rounds) / 1e9


def make_evidence(
    *,
    labels: Sequence[str] = LABELS,
    arm: str = "auto",
    slow: float = 1.0,
    wrong_on: str | None = None,
    jitter: float = 0.02,
) -> Evidence:
    """An honest bench, or one whose arm is ``slow`` times slower, or emits a wrong token on one input."""
    draw = random.Random(5)
    decodes: list[Decode] = []
    texts = {label: _text(label) for label in labels}
    for label in labels:
        ids = _ids(texts[label]["pieces"])
        trace = _trace(label, ids, 512, draw)
        for pair in range(NUM_PAIRS):
            for name in draw.sample(("stock", "serial", arm), 3):
                seconds = _seconds(name, trace) * draw.uniform(1 - jitter, 1 + jitter)
                seconds *= slow if name == arm else 1.0
                mine, own = ids, trace
                if name == arm and label == wrong_on:
                    last = trace.rounds[-1]
                    mine = (*ids[:-1], ids[-1] + 1)
                    own = replace(
                        trace,
                        rounds=(*trace.rounds[:-1], replace(last, emitted=(*last.emitted[:-1], mine[-1]))),
                    )
                leg = Leg(
                    label=label, arm=name, pair=pair, order=len(decodes), start_ns=len(decodes) * 10**10,
                    duration_ns=int(seconds * 1e9), num_tokens=len(mine), tokens_sha256=tokens_sha256(mine),
                    peak_bytes=int({"stock": 812, "serial": 871, arm: 928}[name] * 2**20
                                   + draw.randrange(2**20)),
                    is_first_seen=pair == 0,
                    num_forwards=len(trace.rounds) - 1 if name == arm else len(mine) - 1,
                )  # fmt: skip
                decodes.append(Decode(leg=leg, token_ids=mine, trace=own if name == arm else None))
    return Evidence(
        kind="bench", status="complete", arm=arm, roles=dict.fromkeys(labels, "diverse"), machine=MACHINE,
        plan=PLAN, curve=CURVE, floor=MemoryFloor(num_bytes=270_000_000, bytes_per_second=2.2e10),
        request={"model": "smollm2-135m-instruct", "drafter": arm, "depth": "auto", "suite": "diverse",
                 "labels": [], "pairs": NUM_PAIRS, "max_new_tokens": NUM_TOKENS, "prompt_len": 512,
                 "dtype": "bfloat16", "threads": None, "quality": "exact"},
        prompts={label: tuple(range(512)) for label in labels}, decodes=tuple(decodes), texts=texts,
        provenance={"started": "2026-11-29T20:14:05+0000", "commit": "aadf7db", "tree": "clean",
                    "version": "0.1.0"},
    )  # fmt: skip


def make_evaluation() -> Evidence:
    """A candidate judged on a main, a held-out and four diverse inputs: no engine, so no plan or trace."""
    bench = make_evidence(labels=LABELS[:6], arm="candidate")
    roles: dict[str, Any] = dict.fromkeys(LABELS[:6], "diverse") | {"news": "main", "dialogue": "holdout"}
    steps = {label: 70 + 9 * index for index, label in enumerate(LABELS[:6])}

    def told(decode: Decode) -> Decode:
        if decode.leg.arm != "candidate":
            return decode
        num = steps[decode.leg.label]
        counters = Counters(
            steps=num, verifies=num - 8, drafted=400, accepted=NUM_TOKENS - num, tokens=NUM_TOKENS
        )
        return replace(decode, leg=replace(decode.leg, num_forwards=num, counters=counters), trace=None)

    return replace(
        bench, kind="evaluate", roles=roles, plan=None, curve=None, floor=None,
        request={"transform": "candidates/lookup.py", "workload": "llm", "model": "smollm2-135m-instruct",
                 "pairs": NUM_PAIRS},
        decodes=tuple(told(d) for d in bench.decodes if d.leg.arm != "serial"), provenance={},
    )  # fmt: skip


def make_audit(evidence: Evidence) -> dict[str, Any]:
    num = sum(len(text["pieces"]) for text in evidence.texts.values())
    return {
        "format_version": 2, "outcome": "pass", "findings": [], "num_legs": len(evidence.decodes),
        "num_figures": 1893, "num_outputs": len(evidence.texts), "num_tokens": num, "num_mismatches": 0,
        "num_ties": 0, "rate_bound": 3 / num,
    }  # fmt: skip


def make_margins(evidence: Evidence) -> dict[str, list[float | None]]:
    draw = random.Random(7)
    return {
        label: [round(draw.expovariate(0.4), 4) for _ in text["pieces"]]
        for label, text in evidence.texts.items()
    }


@pytest.fixture(scope="session")
def honest() -> Evidence:
    return make_evidence()


@pytest.fixture(scope="session")
def honest_results(honest: Evidence) -> dict[str, Any]:
    return published.compute(honest)


@pytest.fixture(scope="session")
def evaluation() -> Evidence:
    return make_evaluation()


@pytest.fixture(scope="session")
def evaluation_results(evaluation: Evidence) -> dict[str, Any]:
    return published.compute(evaluation)


@pytest.fixture(scope="session")
def make() -> Callable[..., Evidence]:
    return make_evidence


@pytest.fixture
def audit_of() -> Callable[[Evidence], dict[str, Any]]:
    return make_audit


@pytest.fixture
def margins_of() -> Callable[[Evidence], dict[str, list[float | None]]]:
    return make_margins
