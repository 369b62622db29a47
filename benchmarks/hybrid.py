"""What the hybrid target and its native head must show, on a model of that architecture.

    python benchmarks/hybrid.py tokens      every prompt length, depth and scripted drafter against stock
    python benchmarks/hybrid.py acceptance  depth-1 acceptance of the head, and of the head fed wrongly
    python benchmarks/hybrid.py rollback    share of a round spent on states and on taking rows back

``--model`` is a folder with a head and ``held_out.jsonl``, by default the trained one of the tests; with
``--prompts``, requests the recipe kept out of its training take the place of that file's texts. Exit code 1
where a token differs, where a wrong choice wins, or where rolling back takes 3 % of a round or more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.progress import track
from scipy.stats import bootstrap
from small_hybrid import all_prompts, is_held_out
from torch import Tensor

from draftproof import engine as engines
from draftproof.clock import RealClock
from draftproof.decode import Decoding, speculate
from draftproof.depth import FixedDepth
from draftproof.drafters.base import Drafter
from draftproof.drafters.mtp import MtpDrafter
from draftproof.models.decoder import DecoderSession, DecoderTarget, HiddenRows
from draftproof.models.load import DTYPES
from draftproof.models.stock import StockModel
from draftproof.record import Draft, Round
from draftproof.rules import Rules, RuleSet
from draftproof.testing import ScriptedDrafter

TRAINED = Path(__file__).parents[1] / "tests" / "data" / "small-hybrid"
Maker = Callable[[DecoderSession], Drafter]
LENGTHS = (*range(1, 17), 63, 64, 65, 127, 128, 129)  # shorter than the convolution; around the rule's chunk
DEPTHS = range(9)


@dataclass
class Bench:
    """One engine and one stock model for everything, and the held-out texts as ids."""

    engine: engines.Engine
    stock: StockModel
    texts: list[list[int]]

    @property
    def target(self) -> DecoderTarget:
        """The row-exact target."""
        return cast("DecoderTarget", self.engine.target)

    def decoding(self, prompt: Sequence[int], num_new: int, target: DecoderTarget) -> Decoding:
        """A fresh request without end tokens."""
        rules = Rules(RuleSet(max_new_tokens=num_new), prompt, torch.device("cpu"))
        session = target.open(len(prompt) + num_new + target.max_rows)
        return Decoding(
            session=session, rules=rules, clock=RealClock(), max_rows=target.max_rows,
            margin_bound=self.engine.plan.margin_bound,
        )  # fmt: skip

    def drafted(
        self,
        make: Maker,
        prompt: Sequence[int],
        depth: int,
        num_new: int,
        target: DecoderTarget | None = None,
    ) -> list[Round]:
        """The rounds of a decode with the drafter ``make`` builds for its session."""
        run = self.decoding(prompt, num_new, target or self.target)
        return list(speculate(run, prompt, make(cast("DecoderSession", run.session)), FixedDepth(depth)))

    def head(self, session: DecoderSession) -> MtpDrafter:
        """The drafter under test."""
        return MtpDrafter(self.target, session, self.target.max_context)


def emitted(rounds: Sequence[Round]) -> tuple[int, ...]:
    """All tokens, in order."""
    return tuple(token for one in rounds for token in one.emitted)


# -- tokens


def scripts(truth: Sequence[int], num_prompt: int, vocab: int) -> dict[str, Callable[..., Sequence[int]]]:
    """Drafts made from the true continuation."""

    def right(context: Sequence[int], most: int) -> Sequence[int]:
        return truth[len(context) - num_prompt :][:most]

    def wrong(context: Sequence[int], most: int) -> Sequence[int]:
        return [(token + 1) % vocab for token in right(context, most)]

    def second_wrong(context: Sequence[int], most: int) -> Sequence[int]:
        return [*right(context, most)[:1], *wrong(context, most)[1:]]

    def now_and_then(context: Sequence[int], most: int) -> Sequence[int]:
        return right(context, most) if len(context) % 3 else ()

    return {
        "all accepted": right, "all rejected": wrong, "rejected from the second": second_wrong,
        "empty every third": now_and_then,
    }  # fmt: skip


def scripted(script: Callable[..., Sequence[int]]) -> Maker:
    """A maker of the drafter that follows ``script``."""
    return lambda _: ScriptedDrafter(script)


def tokens(bench: Bench, num_new: int) -> int:
    """Compare with stock; 1 where a token differs."""
    checked = different = 0
    for length in track(LENGTHS, description="prompt lengths"):
        prompt = (bench.texts[length % len(bench.texts)] * length)[:length]
        truth = bench.stock.generate(prompt, num_new, eos_token_id=None)
        for depth in DEPTHS:
            got = emitted(bench.drafted(bench.head, prompt, depth, num_new))
            checked, different = checked + len(got), different + _differing(got, truth)
    sys.stdout.write(f"prompt lengths {LENGTHS[0]} to {LENGTHS[-1]}, depths 0 to 8: {checked} tokens\n")
    for text in track(bench.texts[:16], description="scripted drafters"):
        prompt = text[:40]
        truth = bench.stock.generate(prompt, num_new, eos_token_id=None)
        for script in scripts(truth, len(prompt), bench.target.vocab_size).values():
            for depth in (1, 4, 8):
                got = emitted(bench.drafted(scripted(script), prompt, depth, num_new))
                checked, different = checked + len(got), different + _differing(got, truth)
    plan = bench.engine.plan
    sys.stdout.write(f"{checked} tokens in all, {different} differ from stock's; claim {plan.claim}\n")
    return int(different > 0)


def _differing(got: Sequence[int], want: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(got, want, strict=True))


# -- acceptance


def keep_last(session: DecoderSession) -> None:
    """Of the hidden rows not yet taken, the last one only."""
    rows = session.hidden.take()
    session.hidden.append(rows[-1:])
    session.hidden.commit(1)


class NoPrefill(MtpDrafter):
    """The head never sees the prompt: its cache starts with the first token's slot."""

    is_first = True

    def propose(self, max_tokens: int) -> Draft:
        """As the head proposes; the prompt's slots are dropped first."""
        if self.is_first:
            self.is_first = False
            keep_last(self._session)
            self._unseen = self._unseen[-1:]
        return super().propose(max_tokens)


class FreshState(MtpDrafter):
    """The head forgets between rounds: every draft starts from an empty cache and the last slot."""

    def propose(self, max_tokens: int) -> Draft:
        """As the head proposes, with a state of its own."""
        keep_last(self._session)
        unseen = self._unseen
        self.reset(())
        self._unseen = unseen[-1:]
        return super().propose(max_tokens)


class PreNorm(HiddenRows):
    """Keeps what the final norm read instead of what it gave."""

    def __init__(self, final_norm: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._final_norm, self._latest = final_norm, torch.empty(0)

    def watch(self, h_TD: Tensor) -> Tensor:
        """The final norm, noting its input."""
        self._latest = h_TD
        return self._final_norm(h_TD)

    def append(self, h_TD: Tensor) -> None:
        """The rows before the norm."""
        super().append(self._latest[-len(h_TD) :])


def pre_norm(bench: Bench) -> tuple[DecoderTarget, Maker]:
    """The target and drafter on rows from before the final norm."""
    parts = bench.target.parts
    rows = PreNorm(parts.final_norm)
    target = DecoderTarget(replace(parts, final_norm=rows.watch), bench.target.max_rows)

    def make(session: DecoderSession) -> Drafter:
        session.hidden = rows
        return MtpDrafter(target, session, target.max_context)

    return target, make


def acceptance(bench: Bench, num_new: int) -> int:
    """Depth-1 acceptance by variant; 1 where the right choice does not win."""
    most = bench.target.max_context
    variants: dict[str, Callable[[], tuple[DecoderTarget, Maker]]] = {
        "as built: prefilled, post-norm rows, carried state": lambda: (bench.target, bench.head),
        "without the prompt's slots": lambda: (bench.target, lambda s: NoPrefill(bench.target, s, most)),
        "a fresh state every round": lambda: (bench.target, lambda s: FreshState(bench.target, s, most)),
        "pre-norm rows": lambda: pre_norm(bench),
    }
    rates: dict[str, list[float]] = {}
    for name, variant in variants.items():
        rates[name] = []
        for text in track(bench.texts, description=name):
            target, make = variant()
            rounds = bench.drafted(make, text[:40], 1, num_new, target)[1:]
            drafted = sum(r.num_drafted for r in rounds)
            rates[name].append(sum(r.num_accepted for r in rounds) / drafted)
    built = next(iter(rates.values()))
    for name, found in rates.items():
        spread = f"{min(found):.3f}-{max(found):.3f}"
        sys.stdout.write(f"{statistics.fmean(found):.3f} ({spread} over {len(found)} texts)  {name}\n")
        if found is not built:
            worse = [a - b for a, b in zip(built, found, strict=True)]
            low, high = bootstrap((worse,), np.mean, method="percentile", rng=0).confidence_interval
            sys.stdout.write(
                f"    worse by {statistics.fmean(worse):.3f}, 95 % {low:.3f} to {high:.3f}, paired\n"
            )
    means = [statistics.fmean(found) for found in rates.values()]
    return int(means[0] != max(means))


# -- rollback


class Timed:
    """A method with the time spent in it."""

    def __init__(self, method: Callable[..., Any], clock: RealClock) -> None:
        self._method, self._clock, self.nanoseconds = method, clock, 0

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        start = self._clock.now_ns()
        try:
            return self._method(*args)
        finally:
            self.nanoseconds += self._clock.now_ns() - start


def watched(bench: Bench, parts: list[Timed], session: DecoderSession) -> Drafter:
    """The head's drafter on a session whose bookkeeping is timed."""
    for owner, name in (
        (session.recurrent, "begin"), (session.recurrent, "commit"), (session.cache, "begin"),
        (session.cache, "commit"), (session.hidden, "append"), (session.hidden, "commit"),
    ):  # fmt: skip
        parts.append(Timed(getattr(owner, name), RealClock()))
        setattr(owner, name, parts[-1])
    return bench.head(session)


def shares(bench: Bench, num_new: int) -> Iterator[float]:
    """Time of reserving, copying and taking back rows, as a share of the rounds at depth 4, a text each."""
    for text in track(bench.texts, description="rollback"):
        parts: list[Timed] = []
        rounds = bench.drafted(partial(watched, bench, parts), text[:40], 4, num_new)[1:]
        whole = sum(r.draft_ns + r.verify_ns + r.commit_ns for r in rounds)
        yield sum(part.nanoseconds for part in parts) / whole


def rollback(bench: Bench, num_new: int) -> int:
    """Print the shares; 1 at 3 % or more."""
    found = sorted(shares(bench, num_new))
    median = statistics.median(found)
    sys.stdout.write(
        f"states, windows and commits: {median:.2%} of a round at depth 4"
        f" ({found[0]:.2%}-{found[-1]:.2%} over {len(found)} texts)\n"
    )
    return int(median >= 0.03)  # noqa: PLR2004 - the issue's bound


def held_out(engine: engines.Engine, row: dict[str, str]) -> list[int]:
    """A held-out request and what the default model answered, as ids."""
    return [*engine.encode(row["prompt"]), *engine.encode(row["continuation"], raw=True)]


def main() -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("tokens", "acceptance", "rollback"))
    parser.add_argument("--model", type=Path, default=TRAINED)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--prompts", type=int, help="so many held-out requests of the recipe, without texts")
    options = parser.parse_args()
    engine = engines.load(str(options.model), dtype=options.dtype)
    if options.prompts:
        unseen = [prompt for prompt in all_prompts() if is_held_out(prompt)][: options.prompts]
        texts = [list(engine.encode(prompt)) for prompt in unseen]
    else:
        lines = (options.model / "held_out.jsonl").read_text().splitlines()[: options.texts]
        texts = [held_out(engine, json.loads(line)) for line in lines]
    stock = StockModel(engine.folder, DTYPES[options.dtype], torch.device("cpu"))
    run = {"tokens": tokens, "acceptance": acceptance, "rollback": rollback}[options.what]
    return run(Bench(engine, stock, texts), options.new_tokens)


if __name__ == "__main__":
    sys.exit(main())
