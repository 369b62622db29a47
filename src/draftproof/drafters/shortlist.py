"""Request-independent lists of ids a native head may draft: from a file, or the most frequent of a corpus.

A smaller output layer makes every draft cheaper; the target still decides over all ids, so a list changes
speed and never tokens (FR-Spec, Zhao et al. 2025, arXiv 2502.14856). No torch here.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from draftproof.errors import OptionError


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


def by_frequency(texts: Iterable[Sequence[int]], size: int, always: Iterable[int] = ()) -> tuple[int, ...]:
    """The ``size`` most frequent ids of tokenised texts, in ascending order.

    Args:
        texts: ids of each text.
        size: most ids to keep; fewer are given where the texts hold fewer.
        always: ids kept whatever their frequency, such as end tokens; they count towards ``size``.
    """
    kept = dict.fromkeys(always)
    if size < max(len(kept), 1):
        raise OptionError(f"a shortlist of {size} ids has no room for the {len(kept)} always kept")
    counts = Counter(i for ids in texts for i in ids)
    ranked = sorted(counts, key=lambda i: (-counts[i], i))
    kept |= dict.fromkeys([i for i in ranked if i not in kept][: size - len(kept)])
    return tuple(sorted(kept))
