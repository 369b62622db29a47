"""Request-independent lists of ids a native head may draft: from a file, or the most frequent of a corpus.

A smaller output layer makes every draft cheaper; the target still decides over all ids, so a list changes
speed and never tokens (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). No torch here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from draftproof.errors import OptionError

# In the folder of a head: what it may draft where a request names nothing else.
DEFAULT_FILE = "shortlist.json"


def read_shortlist(path: Path) -> tuple[int, ...]:
    """The ids in a file: a JSON list, or one id a line.

    Raises:
        OptionError: the file cannot be read or holds anything but ids.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read the shortlist {path}: {error}") from error
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [int(x) for x in text.split()]
    except ValueError as error:
        raise OptionError(f"{path} must hold a JSON list of ids, or one id a line") from error
    if not found or not all(type(i) is int and i >= 0 for i in found):
        raise OptionError(f"{path} must hold ids from 0 on, at least one")
    return tuple(found)


def default_shortlist(head: Path, vocab_size: int) -> tuple[int, ...] | None:
    """The ids in the file ``shortlist.json`` of a head's folder, or ``None`` where there is none.

    Raises:
        OptionError: the file holds anything but ids below ``vocab_size``.
    """
    path = head / DEFAULT_FILE
    if not path.exists():
        return None
    ids = read_shortlist(path)
    if max(ids) >= vocab_size:
        raise OptionError(
            f"{path} holds the id {max(ids)}, but the model has {vocab_size}: remove or renew it"
        )
    return ids


def ranked(counts: Mapping[int, int], ids: Iterable[int], always: Iterable[int] = ()) -> tuple[int, ...]:
    """All of ``ids``, in the order in which a growing shortlist takes them.

    Those of ``always`` first, then by falling count; equal counts, never seen included, by rising id, which
    in a byte-level BPE is the order its merges were learnt in.
    """
    kept = dict.fromkeys(always)
    return (*kept, *sorted((i for i in ids if i not in kept), key=lambda i: (-counts.get(i, 0), i)))


def by_frequency(texts: Iterable[Sequence[int]], size: int, always: Iterable[int] = ()) -> tuple[int, ...]:
    """The ``size`` most frequent ids of tokenised texts, in ascending order.

    Args:
        texts: ids of each text.
        size: most ids to keep; fewer are given where the texts hold fewer.
        always: ids kept whatever their frequency, such as end tokens; they count towards ``size``.
    """
    kept = tuple(dict.fromkeys(always))
    check_room(size, len(kept))
    counts = Counter(i for ids in texts for i in ids)
    return tuple(sorted(ranked(counts, counts, kept)[:size]))


def check_room(size: int, num_always: int) -> None:
    """Refuse a size that is none, or leaves no room for the ids always kept."""
    if size < max(num_always, 1):
        raise OptionError(f"a shortlist of {size} ids has no room for the {num_always} always kept")
