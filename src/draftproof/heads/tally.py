"""What a corpus holds and what was left out, counted shard by shard in order.

Near-duplicates are looked for here, across shards: the first text is kept, later ones are named as removed.
Counts depend on the shards and their order alone, so a resumed run counts as a run in one go.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from draftproof.heads.overlap import NearDuplicates
from draftproof.heads.shards import Row, Shard, prompt_sha256

_MOST_EXAMPLES = 20


class Tally:
    """Add shards in the order of their numbers, then read."""

    def __init__(self) -> None:
        self.removed_rows: list[int] = []
        self.num_tokens = self.num_rows = self.num_prompts = 0
        self._near, self._prompts = NearDuplicates(), set[str]()
        self._tokens: dict[str, Counter[str]] = {}
        self._rows: Counter[str] = Counter()
        self._split_tokens: Counter[str] = Counter()
        self._removed: Counter[str] = Counter()
        self._by_text: Counter[str] = Counter()
        self._hits: list[dict[str, Any]] = []
        self._facts: Counter[str] = Counter()
        self._differences: list[dict[str, Any]] = []
        self._ratios: list[float] = []

    def add(self, shard: Shard) -> None:
        """Count a shard."""
        facts = shard.facts
        self.num_prompts += facts["count"]
        self._removed.update(facts["removed"])
        self._by_text.update(facts["overlap"]["by_text"])
        self._hits += facts["overlap"]["examples"]
        self._differences += facts["stock"]["differences"]
        self._facts.update({name: facts[name] for name in ("num_decoded", "decode_ns")})
        self._facts.update({f"stock {k}": v for k, v in facts["stock"].items() if k != "differences"})
        for row in shard.rows:
            self._add_row(row)
        mine, stocks = _rate(facts["num_decoded"], facts["decode_ns"]), _stock_rate(facts["stock"])
        if mine and stocks:
            self._ratios.append(mine / stocks)

    def _add_row(self, row: Row) -> None:
        reason = self._reason(row)
        if reason:
            self._removed[reason] += 1
            self.removed_rows.append(row.index)
            return
        self.num_rows += 1
        self.num_tokens += row.num_tokens
        self._tokens.setdefault(row.category, Counter())[row.language] += row.num_tokens
        for name in (row.split, row.origin, "sampled" if row.is_sampled else "greedy"):
            self._rows[name] += 1
            self._split_tokens[name] += row.num_tokens

    def _reason(self, row: Row) -> str | None:
        key = prompt_sha256(tuple(text for role, text in row.messages if role != "assistant"))
        if key in self._prompts:
            return "same prompt"
        self._prompts.add(key)
        return None if self._near.is_new(row.text) else "near-duplicate"

    def summary(self) -> dict[str, Any]:
        """All of it, as plain values.

        ``ratio`` is batched tokens a second over stock's, each over all shards' time; in ``ratio_by_shard``
        stock was measured in the middle of the batch.
        """
        facts = self._facts
        names = ("num_rows", "num_equal", "num_tokens", "duration_ns")
        stock = {name: facts[f"stock {name}"] for name in names}
        mine, stocks = _rate(facts["num_decoded"], facts["decode_ns"]), _stock_rate(stock)
        return {
            "num_prompts": self.num_prompts, "num_rows": self.num_rows, "num_tokens": self.num_tokens,
            "num_decoded_tokens": facts["num_decoded"], "decode_ns": facts["decode_ns"],
            "tokens_per_second": mine,
            "stock": {**stock, "tokens_per_second": stocks, "differences": self._differences},
            "ratio": mine / stocks if mine and stocks else None, "ratio_by_shard": self._ratios,
            "removed": dict(self._removed.most_common()),
            "overlap": {
                "by_text": dict(self._by_text.most_common()), "examples": self._hits[:_MOST_EXAMPLES],
            },
            "tokens_by_category": {k: dict(v) for k, v in sorted(self._tokens.items())},
            "parts": {k: {"num_rows": v, "num_tokens": self._split_tokens[k]} for k, v in self._rows.items()},
        }  # fmt: skip


def _stock_rate(stock: dict[str, Any]) -> float | None:
    return _rate(stock["num_tokens"], stock["duration_ns"])


def _rate(num_tokens: int, duration_ns: int) -> float | None:
    return num_tokens / duration_ns * 1e9 if num_tokens and duration_ns else None
