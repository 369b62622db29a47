"""Qwen3.5 shapes with random weights on a device: claim, times, graphs, and speedup against acceptance.

    python benchmarks/gpu_hybrid.py --size 9b --device cuda       (one GPU of 48 GiB or more, ten minutes)
    python benchmarks/gpu_hybrid.py --size tiny --device cpu      (a laptop, a minute)

Random weights cost what trained ones cost, but draft nothing useful: drafts are taken from stock's own
continuation and made wrong at random, after the head has really run. All times are medians of interleaved
calls with the device synchronised; ratios are against stock's token in the same run. ``--out`` keeps all of
it as JSON. Exit code 1 where a token differs, or a bit under the claim ``bitwise``.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5TextConfig

from draftproof.clock import RealClock
from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import FixedDepth
from draftproof.drafters.mtp import MtpDrafter, head_of
from draftproof.models.decoder import DecoderSession, DecoderTarget
from draftproof.models.load import DTYPES, ModuleWeights, build_decoder
from draftproof.plans import PlanRequest, PlanStore
from draftproof.probe import calibrate_margin
from draftproof.record import Draft, Plan
from draftproof.rules import Rules, RuleSet

_RELEASED = {
    "vocab_size": 248320, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "max_position_embeddings": 262144, "tie_word_embeddings": False,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "0.8b": _RELEASED | {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "4b": _RELEASED | {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32, "tie_word_embeddings": True,
    },
    "9b": _RELEASED | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "linear_num_value_heads": 32,
    },
    "27b": _RELEASED | {
        "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
        "num_key_value_heads": 4, "linear_num_value_heads": 48,
    },
}  # fmt: skip
ROWS = (1, 2, 3, 4, 5, 6, 7, 8)
DEPTHS = (1, 2, 3, 4)
RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SHORTLISTS = (32, 8)  # parts of the vocabulary: 7760 and 31040 ids of the released ones


class WithHead(ModuleWeights):
    """A module's tensors and a random head beside them."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        config = module.config
        hidden = config.hidden_size
        like = f"model.layers.{config.layer_types.index('full_attention')}."
        layer = {k.removeprefix(like): v for k, v in self._tensors.items() if k.startswith(like)}
        made = {f"mtp.layers.0.{name}": torch.randn_like(tensor) * 0.02 for name, tensor in layer.items()}
        weight = module.model.norm.weight
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            made[f"mtp.{name}.weight"] = torch.zeros_like(weight)
        fc = torch.randn(hidden, 2 * hidden, device=weight.device) * 0.02
        self._tensors |= made | {"mtp.fc.weight": fc.to(weight.dtype)}


@dataclass
class Subject:
    """The model twice: as stock and as a row-exact target on the same weights."""

    module: Any
    target: DecoderTarget
    plan: Plan
    prompt: list[int]
    device: torch.device

    def now(self) -> float:
        """Seconds, with all work done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return RealClock().now_ns() / 1e9

    def seconds(self, calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
        """Times of every call, interleaved; the first two rounds warm up."""
        found: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(repeats + 2):
            for name, call in calls.items():
                start = self.now()
                call()
                if turn > 1:
                    found[name].append(self.now() - start)
        return found

    def session(self, num_more: int) -> DecoderSession:
        """A session past the prompt."""
        session = self.target.open(len(self.prompt) + num_more)
        session.hidden.keep()
        session.prefill(self.prompt)
        return session


def build(size: str, device: torch.device, dtype: torch.dtype, prompt_len: int) -> Subject:
    """Random weights, once in memory, and the plan of this device."""
    config = Qwen3_5TextConfig(**SIZES[size], bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with device:
        module: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(7)
    for parameter in module.parameters():
        if parameter.ndim > 1:  # wider than usual, so that text varies
            parameter.normal_(0, 2 / parameter.shape[-1] ** 0.5, generator=generator)
    plan = PlanStore(device, RealClock()).plan(config, PlanRequest(dtype=dtype, device=device, share=True))
    target = build_decoder(config, WithHead(module), plan, dtype=dtype, device=device)
    if plan.claim == "guarded":
        plan = replace(plan, margin_bound=calibrate_margin(target))
    prompt = [(7 * i * i + 3 * i) % config.vocab_size for i in range(prompt_len)]
    return Subject(module, target, plan, prompt, device)


@torch.inference_mode()
def stock_steps(subject: Subject, num_steps: int) -> tuple[list[int], Tensor]:
    """Stock's greedy tokens and the logits of every step, ``[n, V]``."""
    cache = DynamicCache(config=subject.module.config)
    fed, tokens, logits = torch.tensor([subject.prompt], device=subject.device), [], []
    for _ in range(num_steps):
        out = subject.module(fed, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        logits.append(out)
        tokens.append(int(out.float().argmax()))
        fed = torch.tensor([[tokens[-1]]], device=subject.device)
    return tokens, torch.cat(logits)


def check_bits(subject: Subject, num_steps: int) -> dict[str, int]:
    """Steps whose logits are not stock's to the bit, by rows a verification."""
    tokens, want_NV = stock_steps(subject, num_steps)
    found = {}
    for rows in (1, 2, 4, 8):
        session = subject.session(num_steps + subject.target.max_rows)
        got = []
        for start in range(0, num_steps - 1, rows):
            got.append(session.verify(tokens[start : min(start + rows, num_steps - 1)]))
            session.commit(len(got[-1]))
        found[str(rows)] = int((torch.cat(got) != want_NV[1:]).any(1).sum())
    return found


@torch.inference_mode()
def step_times(subject: Subject, repeats: int) -> dict[str, list[float]]:
    """Stock's token, verifications of 1 to 8 rows, commits, and the head's step by output layer."""
    cache = DynamicCache(config=subject.module.config)
    one = torch.tensor([[1]], device=subject.device)
    subject.module(torch.tensor([subject.prompt], device=subject.device), cache=cache, use_cache=True)
    session = subject.session(9 * (repeats + 3) + subject.target.max_rows)

    def verify(rows: int) -> None:
        session.verify([1] * rows).argmax(-1)
        session.commit(0)

    def accept() -> None:
        session.verify([1] * 4)
        start = subject.now()
        session.commit(2)
        commits.append(subject.now() - start)

    commits: list[float] = []
    calls: dict[str, Callable[[], object]] = {
        "stock token": lambda: subject.module(one, cache=cache, use_cache=True).logits.argmax(-1)
    }
    for rows in ROWS:
        calls[f"verify {rows}"] = lambda rows=rows: verify(rows)  # type: ignore[misc]
    calls["verify 4, commit 2"] = accept
    found = subject.seconds(calls | head_calls(subject), repeats)
    return found | {"commit of 2 of 4": commits[2:]}


def head_calls(subject: Subject) -> dict[str, Callable[[], object]]:
    """One draft step of the head with its whole output layer and with shortlists."""
    head, session = head_of(subject.target), subject.session(subject.target.max_rows)
    state = head.open(len(subject.prompt) + 64, subject.target.max_rows, subject.target.tables(1024))
    hidden = session.hidden.take()
    state.catch_up(torch.tensor(subject.prompt[1:], device=subject.device), hidden[:-1])
    one = torch.tensor([1], device=subject.device)

    def step(output: Any) -> None:
        output.rows(state.extend(one, hidden[-1:])).argmax(-1)
        state.cache.commit(0)

    calls: dict[str, Callable[[], object]] = {"head step": lambda: step(head.output)}
    for part in SHORTLISTS:
        size = subject.target.vocab_size // part
        short = head.shortlist(torch.arange(size, device=subject.device))
        calls[f"head step, {size} ids"] = lambda short=short: step(short)  # type: ignore[misc]
    return calls


@torch.inference_mode()
def graph_times(subject: Subject, repeats: int) -> dict[str, list[float]]:
    """A captured verification replayed at the position it was captured at, by rows; CUDA only."""
    calls: dict[str, Callable[[], object]] = {}
    for rows in (1, 2, 4, 8):
        session = subject.session(subject.target.max_rows)
        ids = torch.ones(rows, dtype=torch.long, device=subject.device)

        def verify(session: DecoderSession = session, ids: Tensor = ids) -> None:
            session.verify(ids)
            session.commit(0)

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                verify()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            verify()
        calls[f"replay {rows}"] = graph.replay
    return subject.seconds(calls, repeats)


class Oracle(MtpDrafter):
    """The head runs and its drafts are replaced: each token right with probability ``rate``."""

    def __init__(self, subject: Subject, session: DecoderSession, truth: Sequence[int], rate: float) -> None:
        super().__init__(subject.target, session, subject.target.max_context)
        self._truth, self._rate, self._random = truth, rate, random.Random(3)
        self._num_done, self._vocab = 0, subject.target.vocab_size

    def observe(self, token_ids: Sequence[int]) -> None:
        """As the head observes, counting."""
        self._num_done += len(token_ids)
        super().observe(token_ids)

    def propose(self, max_tokens: int) -> Draft:
        """As many tokens as the head drafted."""
        num = len(super().propose(max_tokens).ids)
        right = self._truth[self._num_done : self._num_done + num]
        ids = [i if self._random.random() < self._rate else (i + 1) % self._vocab for i in right]
        return Draft(ids=tuple(ids), source=self.name)


def speedups(subject: Subject, num_new: int, pairs: int) -> tuple[list[dict[str, Any]], int]:
    """Median time ratio of stock's decode to ours by acceptance rate and depth; tokens that differ."""
    truth, _ = stock_steps(subject, num_new)
    rows, different = [], 0
    cases = [(0.0, 0), *((rate, depth) for rate in RATES for depth in DEPTHS)]
    for rate, depth in cases:
        ratios = []
        for pair in range(pairs):
            legs = {"stock": lambda: stock_steps(subject, num_new)[0]}
            legs["ours"] = lambda rate=rate, depth=depth: decode(subject, truth, rate, depth)  # type: ignore[misc]
            took, tokens = {}, {}
            for name in ("stock", "ours") if pair % 2 == 0 else ("ours", "stock"):
                start = subject.now()
                tokens[name] = legs[name]()
                took[name] = subject.now() - start
            ratios.append(took["stock"] / took["ours"])
            different += sum(a != b for a, b in zip(tokens["stock"], tokens["ours"], strict=True))
        told = {"rate": rate, "depth": depth, "speedup": statistics.median(ratios), "pairs": ratios}
        rows.append(told)
        sys.stdout.write(
            f"right with probability {rate:.1f}, depth {depth}: {told['speedup']:.2f}x"
            f" ({min(ratios):.2f}-{max(ratios):.2f})\n"
        )
    return rows, different


def decode(subject: Subject, truth: Sequence[int], rate: float, depth: int) -> list[int]:
    """Our decode of the prompt; depth 0 is our serial one."""
    num_new = len(truth)
    run = Decoding(
        session=subject.target.open(len(subject.prompt) + num_new + subject.target.max_rows),
        rules=Rules(RuleSet(max_new_tokens=num_new), subject.prompt, subject.device), clock=RealClock(),
        max_rows=subject.plan.max_rows, margin_bound=subject.plan.margin_bound,
    )  # fmt: skip
    if depth == 0:
        rounds = plain_decode(run, subject.prompt)
    else:
        session: Any = run.session
        rounds = speculate(run, subject.prompt, Oracle(subject, session, truth, rate), FixedDepth(depth))
    return [token for one in rounds for token in one.emitted]


def show(times: dict[str, list[float]], unit: float) -> dict[str, float]:
    """Print medians in milliseconds and in stock tokens."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, found in times.items():
        low, high = min(found) * 1e3, max(found) * 1e3
        told = (
            f"{medians[name] * 1e3:9.3f} ms ({low:.3f}-{high:.3f}) {medians[name] / unit:7.3f} stock tokens"
        )
        sys.stdout.write(f"{told}  {name}\n")
    return medians


def main() -> int:
    """Run everything."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    subject = build(options.size, device, DTYPES[options.dtype], options.prompt_len)
    sys.stdout.write(f"{options.size} {options.dtype} on {device}: claim {subject.plan.claim}\n")
    for op in subject.plan.ops:
        refused = f", refused: {op.rejected}" if op.rejected else ""
        sys.stdout.write(f"  {op.op}: {op.form}, {'exact' if op.is_exact else 'NOT exact'}{refused}\n")
    bits = check_bits(subject, options.new_tokens)
    sys.stdout.write(f"steps that differ in a bit, by rows, of {options.new_tokens - 1}: {bits}\n")
    times = step_times(subject, options.repeats)
    unit = statistics.median(times["stock token"])
    medians = show(times, unit)
    graphs = show(graph_times(subject, options.repeats), unit) if device.type == "cuda" else {}
    rows, different = speedups(subject, options.new_tokens, options.pairs)
    sys.stdout.write(f"{different} tokens differ from stock's\n")
    if options.out is not None:
        told = {
            "options": {k: str(v) for k, v in vars(options).items()}, "torch": torch.__version__,
            "claim": subject.plan.claim, "bits": bits, "seconds": times, "medians": medians,
            "graphs": graphs, "speedups": rows, "different": different,
        }  # fmt: skip
        options.out.write_text(json.dumps(told, indent=1) + "\n")
    is_broken = subject.plan.claim == "bitwise" and any(bits.values())
    return int(bool(different) or is_broken)


if __name__ == "__main__":
    sys.exit(main())
