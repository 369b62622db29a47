"""``draftproof head shortlist``: coverage by kind and language, costs by size, and the lists as files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from draftproof.cli.head import provenance_of
from draftproof.cli.terminal import Report, progress_line, quiet_transformers, stdout
from draftproof.errors import DrafterError, OptionError

AUTO = "auto"
_DEPTH, _ACCEPTANCE = 3, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The options; ``timing`` holds those that mean something with ``--cost`` only, absent ones ``None``."""

    corpus: Path
    model: str
    dtype: str
    sizes: tuple[str, ...]
    cost: bool
    timing: dict[str, Any]
    out: Path | None
    json_output: bool

    @property
    def is_auto(self) -> bool:
        """Whether the best size is looked for."""
        return AUTO in self.sizes

    @property
    def is_timed(self) -> bool:
        """Whether costs are measured."""
        return self.cost or self.is_auto

    @property
    def numbers(self) -> tuple[int, ...]:
        """The sizes that are numbers."""
        try:
            return tuple(int(size) for size in self.sizes if size != AUTO)
        except ValueError as error:
            raise OptionError(f"--size must be a number of ids or auto: {error}") from error

    def check(self) -> None:
        """Refuse options that would do nothing."""
        given = [name for name, value in self.timing.items() if value is not None]
        if given and not self.is_timed:
            flags = ", ".join(f"--{name}" for name in given)
            raise OptionError(f"{flags} would do nothing: add --cost or --size auto")


def run(wishes: Wishes) -> int:
    """0 when the sizes were shown and, with ``--out``, the lists written."""
    from draftproof.heads import shortlist as lists

    quiet_transformers()
    wishes.check()
    numbers, wish = wishes.numbers, _wish(wishes.timing)
    if wishes.out is not None:
        lists.check_out(wishes.out)
    with progress_line() as report:
        facts = provenance_of({"model": wishes.model, "dtype": wishes.dtype}, report)
        vocabulary = lists.Vocabulary.of(Path(facts["model_folder"]))
        corpus = lists.corpus_facts(wishes.corpus)
        counts = lists.count_corpus(wishes.corpus, vocabulary, report)
        ranking = lists.rank(counts, vocabulary, numbers or lists.default_sizes(vocabulary.size))
        cost = _cost(wishes, wish, ranking, report) if wishes.is_timed else None
    sizes = ranking.sizes
    if wishes.is_auto and cost is not None:
        sizes = tuple(size for size in sizes if size == cost["best"])
    summary: dict[str, Any] = {
        "model": wishes.model, "corpus": corpus, "num_train_tokens": counts.train.total(),
        "always": list(vocabulary.always), "coverage": ranking.summary(), "cost": cost, "chosen": list(sizes),
    }  # fmt: skip
    written = []
    if wishes.out is not None:
        for size in sizes:
            path = lists.place_of(wishes.out, size, len(sizes))
            lists.write_shortlist(path, ranking.ids(size), {**summary, "run": facts})
            written.append(str(path))
    summary["written"] = written
    left = wishes.out is not None and not written and wishes.out.exists()
    summary["left"] = str(wishes.out) if left else None
    if wishes.json_output:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        _show(summary, wishes)
    return 0


def _wish(timing: dict[str, Any]) -> Any:
    """Depth and acceptance, given or usual, refused before anything is counted."""
    from draftproof.heads.sizing import Wish

    depth, acceptance = timing["depth"], timing["acceptance"]
    return Wish(
        depth=_DEPTH if depth is None else depth,
        acceptance=_ACCEPTANCE if acceptance is None else acceptance,
    )


def _cost(wishes: Wishes, wish: Any, ranking: Any, report: Report) -> dict[str, Any]:
    """Measured costs and predicted speeds, as plain values, with the size that is ``best``."""
    from draftproof import engine as engines
    from draftproof.clock import RealClock
    from draftproof.heads import sizing
    from draftproof.models.decoder import DecoderTarget

    given = {
        name: wishes.timing[name] for name in ("head", "device", "threads") if wishes.timing[name] is not None
    }
    engine = engines.load(wishes.model, dtype=wishes.dtype, progress=report, **given)
    target = engine.target
    if not isinstance(target, DecoderTarget):
        raise DrafterError(f"--cost needs a row-exact target; {target.name!r} runs through transformers")
    costs = sizing.measure(
        target, engine.curve, ranking.order, ranking.sizes, wish, clock=RealClock(), report=report
    )
    shares = dict(zip(ranking.sizes, ranking.whole.shares, strict=True))
    found = sizing.worths(shares, costs, wish)
    return {**sizing.cost_summary(costs, found, wish), "best": sizing.best(found).size}


def _show(summary: dict[str, Any], wishes: Wishes) -> None:
    console = stdout()
    title = f"{summary['model']}: share of held-out answer tokens in the list (a ceiling)"
    console.print(Text(title), soft_wrap=True)
    console.print(coverage_table(summary))
    cost = summary["cost"]
    if cost is not None:
        wish = f"depth {cost['depth']} and an assumed acceptance of {cost['acceptance']:g}"
        title = f"a drafted token at each size; speeds predicted for {wish}"
        console.print(Text(title), soft_wrap=True)
        console.print(cost_table(cost))
    console.print(Text("\n".join(lines(summary, is_auto=wishes.is_auto))), soft_wrap=True)


def coverage_table(summary: dict[str, Any]) -> Table:
    """Share of held-out tokens in the list: a column a size, a line a category, a language, and all."""
    found = summary["coverage"]
    made = _table()
    for name in ("", "tokens", *(str(size) for size in found["sizes"])):
        made.add_column(name, justify="left" if not name else "right")
    for part in (found["by_category"], found["by_language"], {"all": found["all"]}):
        for name, line in part.items():
            made.add_row(name, str(line["num_tokens"]), *(f"{share:.1%}" for share in line["shares"]))
        made.add_section()
    return made


def cost_table(cost: dict[str, Any]) -> Table:
    """What every size costs and is predicted to yield, all ids last."""
    made = _table()
    names = ("ids", "covered", "output ms", "±", "saved ms", "covered per ms", "tokens/s", "against all")
    for name in names:
        made.add_column(name, justify="right")
    whole = cost["sizes"][-1]["tokens_per_second"]
    for line in cost["sizes"]:
        gained = line["coverage_per_ms"]
        made.add_row(
            str(line["size"]), f"{line['coverage']:.1%}", f"{line['output_ms']:.3f}",
            f"{line['spread_ms']:.3f}", f"{line['saved_ms']:.3f}", "" if gained is None else f"{gained:.1%}",
            f"{line['tokens_per_second']:.1f}", f"{line['tokens_per_second'] / whole:.2f}x",
        )  # fmt: skip
    return made


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def lines(summary: dict[str, Any], *, is_auto: bool) -> list[str]:
    """What was counted, how it was timed, what was chosen and where it is."""
    found, cost = summary["coverage"], summary["cost"]
    told = [
        f"{summary['num_train_tokens']} train tokens, {found['num_seen']} of {found['vocab_size']} ids seen;"
        f" {len(summary['always'])} special ids are always in; a list longer than what was seen goes on with"
        " the lowest unseen ids"
    ]
    if cost is not None:
        body = "measured on the head" if cost["is_body_measured"] else "a layer's share of a forward"
        told.append(
            f"medians of {cost['num_repeats']} interleaved calls; the rest of a drafted token takes"
            f" {cost['body_ms']:.3f} ms ({body}), a verification {cost['verification_ms']:.2f} ms"
        )
    if is_auto:
        told.append(_choice(summary["chosen"]))
    if summary["left"] is not None:
        told.append(f"{summary['left']} holds a list of an earlier run: remove it where a head would use it")
    return [*told, *(f"shortlist: {path}" for path in summary["written"])]


def _choice(chosen: Sequence[int]) -> str:
    if not chosen:
        return "auto: all ids are predicted fastest, so there is no list to choose"
    return f"auto: {chosen[0]} ids, the most predicted tokens a second"
