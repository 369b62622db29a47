"""``honest_run(...)``: a bench as an honest harness would record it, for tests of what reads runs.

Two inputs, three arms (stock, serial, lookup), every trace made by the accept rule from tokens and drafts
that are right up to a place. Times come from a seed; stock is about twice as slow as lookup.

``address``: of a Ray cluster of two nodes in this machine, which knows the asking module's own classes.

``head_folder(kind, seed=1, dtype=float32)``: the folder of a random head of the tiny model ``kind``, as a
trained head is stored, or a native one for families that have it.

``answered(answers)``: the folder of a corpus of these (split, category, language, text), in the tokens of the
tiny models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from draftproof.folder import SERIAL, STOCK, Decode, Evidence
from draftproof.heads.shards import Row, Shard, write_manifest, write_shard
from draftproof.models.load import load_tokenizer, read_config
from draftproof.models.mtp import HEAD_STYLES, trained_style
from draftproof.record import Counters, Leg, Machine, MemoryFloor, OpEvidence, Plan, Round, Trace
from draftproof.stats import decode_stats
from draftproof.wire import tokens_sha256

PROMPTS = {"news": (5, 9, 200, 31, 77), "code": (8, 3, 120, 44, 6, 15, 91)}
OUTPUTS = {label: tuple(random.Random(label).choices(range(288), k=40)) for label in ("news", "code")}
_NANOSECONDS = {STOCK: 40_000_000, SERIAL: 32_000_000, "lookup": 20_000_000}
_SPREAD = 0.02


def traced(num_prompt: int, tokens: Sequence[int], drafted: int, seed: int) -> Trace:
    """``tokens`` in rounds of ``drafted`` offered tokens, of which some are right; 0 drafts nothing."""
    rng, done = random.Random(seed), 1
    rounds = [
        Round(index=0, position=num_prompt, source="prompt", num_offered=0, num_drafted=0, num_accepted=0,
              emitted=tuple(tokens[:1]), num_forwards=0, reason="prompt")
    ]  # fmt: skip
    while done < len(tokens):
        right = tokens[done : done + min(rng.randrange(drafted + 1), len(tokens) - done)]
        wrong = [(tokens[min(done + len(right), len(tokens) - 1)] + 1) % 288] * (drafted - len(right))
        offered = (*right, *wrong)
        emitted = tuple(tokens[done : done + len(right) + 1])
        rounds.append(
            Round(index=len(rounds), position=num_prompt + done, source="lookup" if drafted else "none",
                  num_offered=len(offered), num_drafted=len(offered), num_accepted=len(right),
                  emitted=emitted, draft_ns=1000, verify_ns=200_000, commit_ns=500, offered=offered,
                  reason="fixed")
        )  # fmt: skip
        done += len(emitted)
    return Trace(num_prompt=num_prompt, prefill_ns=1_000_000, rounds=tuple(rounds))


def _leg(label: str, arm: str, pair: int, order: int, start: int, duration: int, tokens: Sequence[int],
         trace: Trace | None) -> Leg:  # fmt: skip
    told = decode_stats(trace) if trace else None
    return Leg(
        label=label, arm=arm, pair=pair, order=order, start_ns=start, duration_ns=duration,
        num_tokens=len(tokens), tokens_sha256=tokens_sha256(tokens),
        peak_bytes=1_000_000 + (0 if arm == STOCK else 1000), is_first_seen=pair == 0,
        num_forwards=told.steps if told else len(tokens) - 1,
        counters=None if told is None else Counters(
            steps=told.steps, verifies=told.verifies, drafted=told.drafted, accepted=told.accepted,
            tokens=told.tokens,
        ),
    )  # fmt: skip


def _run(
    outputs: Mapping[str, Sequence[int]] = OUTPUTS, *, prompts: Mapping[str, Sequence[int]] = PROMPTS,
    pairs: int = 3, changed: Mapping[tuple[str, str], Sequence[int]] | None = None,
    machine: Machine | None = None, **request: Any,
) -> Evidence:  # fmt: skip
    """``changed`` gives other outputs by (label, arm); ``request`` adds to the run's settings."""
    rng, decodes, now = random.Random(7), [], 1_000_000_000
    for label, plain in outputs.items():
        for pair in range(pairs):
            for arm in (STOCK, SERIAL, "lookup") if pair % 2 else ("lookup", SERIAL, STOCK):
                tokens = tuple((changed or {}).get((label, arm), plain))
                trace = None
                if arm != STOCK:
                    trace = traced(len(prompts[label]), tokens, 4 if arm == "lookup" else 0, seed=pair)
                duration = round(_NANOSECONDS[arm] * rng.uniform(1 - _SPREAD, 1 + _SPREAD))
                leg = _leg(label, arm, pair, len(decodes), now, duration, tokens, trace)
                decodes.append(Decode(leg=leg, token_ids=tokens, trace=trace))
                now += duration + 1_000_000
    op = OpEvidence(op="qkv", shape=(64, 128), form="packed", max_rows=16, is_exact=True, num_checked=9,
                    seconds_by_rows={1: 1e-5, 2: 1.1e-5, 10: 1.25e-5})  # fmt: skip
    settings = {"model": "tiny", "dtype": "float32", "device": "cpu", "drafter": "lookup", "suite": "mine",
                "pairs": pairs, "max_new_tokens": 40, "stop": "fixed", "quality": "exact"}  # fmt: skip
    return Evidence(
        kind="bench", request=settings | request, status="complete", arm="lookup",
        roles=dict.fromkeys(outputs, "diverse"),
        machine=machine or Machine(cpu="c", isa="i", num_threads=2, device="cpu", os="o", python="3",
                                   torch="2", transformers="5", environment=("OMP_NUM_THREADS=2",)),
        plan=Plan(claim="bitwise", dtype="float32", fingerprint="f", ops=(op,), max_rows=16),
        floor=MemoryFloor(num_bytes=1000, bytes_per_second=1e9),
        prompts={label: tuple(prompts[label]) for label in outputs}, decodes=tuple(decodes),
        texts={label: {"prompt": "pé", "pieces": [" x"] * len(ids)} for label, ids in outputs.items()},
        notes=("a note",), provenance={"command": "draftproof bench"},
    )  # fmt: skip


@pytest.fixture(scope="session")
def honest_run() -> Callable[..., Evidence]:
    """``honest_run(outputs, prompts=, pairs=, changed=, machine=, **request)``."""
    return _run


@pytest.fixture
def head_folder(tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    def make(kind: str, seed: int = 1, dtype: torch.dtype = torch.float32) -> Path:
        config = read_config(tiny_folder(kind))
        style = HEAD_STYLES.get(config.model_type) or trained_style(config)
        prefix, hidden = style.prefix_in(config), config.hidden_size
        stored = safetensors.torch.load_file(tiny_folder(kind) / "model.safetensors")
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        like = f"model.layers.{kinds.index('full_attention')}."
        shapes = {
            f"{prefix}{style.block}{k.removeprefix(like)}": v.shape
            for k, v in stored.items() if k.startswith(like)
        }  # fmt: skip
        norms = (style.embedding_norm, style.hidden_norm, style.final_norm)
        shapes |= {f"{prefix}{name}.weight": torch.Size([hidden]) for name in norms}
        shapes[f"{prefix}{style.projection}.weight"] = torch.Size([hidden, 2 * hidden])
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)
            for name, shape in shapes.items()
        }
        folder = tmp_path / f"head{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
        return folder

    return make


@pytest.fixture
def answered(tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    tokenizer = load_tokenizer(tiny_folder("llama"))

    def make(answers: Sequence[tuple[Any, str, str, str]], **manifest: Any) -> Path:
        folder = tmp_path / f"corpus{len(list(tmp_path.iterdir()))}"
        rows = tuple(
            Row(
                index=index, category=category, language=language, origin="template", split=split,
                is_raw=False, is_sampled=False, finished=True, messages=(("user", f"prompt {index}"),),
                text=text, ids=(7, 7, 7, *tokenizer.encode(text)), prompt_length=3,
            )
            for index, (split, category, language, text) in enumerate(answers)
        )  # fmt: skip
        files = write_shard(folder, Shard(number=0, rows=rows, facts={"count": len(rows)}))
        document = {
            "status": "complete", "request": {"weights": "w"}, "shards": [{"shard": 0, "files": files}],
            "removed_rows": [], "summary": {"num_rows": len(rows)}, **manifest,
        }  # fmt: skip
        write_manifest(folder, document)
        return folder

    return make


@pytest.fixture(scope="module")
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster  # noqa: PLC0415 - Ray is an extra

    ray.cloudpickle.register_pickle_by_value(request.module)
    node = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        yield cluster.address
    finally:
        cluster.shutdown()
        ray.cloudpickle.unregister_pickle_by_value(request.module)
