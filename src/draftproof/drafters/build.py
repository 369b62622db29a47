"""Drafter names to drafters, in one explicit table.

Third parties register a factory ``(options) -> Drafter`` under the entry point group
``draftproof.drafters``; it is loaded by name only, never searched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from draftproof.depth import DepthPolicy
from draftproof.drafters.base import Drafter
from draftproof.drafters.cascade import Cascade
from draftproof.drafters.lookup import PromptLookup
from draftproof.drafters.model import ModelDrafter, check_vocabulary
from draftproof.drafters.mtp import MtpDrafter, head_of
from draftproof.drafters.suffix import SuffixAutomatonDrafter
from draftproof.errors import DrafterError, OptionError
from draftproof.models.base import Session, Target
from draftproof.models.decoder import DecoderSession, DecoderTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions:
    """What a drafter may be built from.

    ``capacity`` is the number of positions of the request, one draft included; ``exit_layer`` how many of
    the target's layers the early exit runs, a third by default. ``open_session`` gives the request's own
    session, the same at every call: a native head reads its hidden rows. ``shortlist`` limits what such a
    head may draft.
    """

    target: Target
    policy: DepthPolicy
    capacity: int
    draft_model: Target | None = None
    exit_layer: int | None = None
    open_session: Callable[[], Session] | None = None
    shortlist: tuple[int, ...] | None = None


def _draft_model(options: DrafterOptions) -> Drafter:
    if options.draft_model is None:
        raise DrafterError("drafter 'draft_model' needs --draft-model NAME_OR_PATH")
    check_vocabulary(options.target, options.draft_model)
    return ModelDrafter(options.draft_model, options.capacity)


def _early_exit(options: DrafterOptions) -> Drafter:
    target = options.target
    if not isinstance(target, DecoderTarget):
        raise DrafterError(f"early exit needs a row-exact target; {target.name!r} runs through transformers")
    layers = options.exit_layer if options.exit_layer is not None else max(1, target.num_layers // 3)
    if not 1 <= layers < target.num_layers:
        raise DrafterError(f"--exit-layer must be 1 to {target.num_layers - 1}, got {layers}")
    return ModelDrafter(target.truncated(layers), options.capacity, name="early_exit")


def _mtp(options: DrafterOptions) -> Drafter:
    head_of(options.target)
    session = options.open_session() if options.open_session is not None else None
    if not isinstance(options.target, DecoderTarget) or not isinstance(session, DecoderSession):
        raise DrafterError("drafter 'mtp' needs the request's own session")
    return MtpDrafter(options.target, session, options.capacity, options.shortlist)


def has_native_head(target: Target) -> bool:
    """Whether drafter ``mtp`` can run, and ``auto`` uses it."""
    return isinstance(target, DecoderTarget) and target.parts.native_head is not None


def _auto(options: DrafterOptions) -> Drafter:
    cheap: list[Drafter] = [SuffixAutomatonDrafter(), PromptLookup()]
    costly = [_draft_model(options)] if options.draft_model is not None else []
    if has_native_head(options.target):
        costly.append(_mtp(options))
    return Cascade(cheap, costly, options.policy)


DRAFTERS: dict[str, Callable[[DrafterOptions], Drafter]] = {
    "lookup": lambda _: PromptLookup(),
    "suffix": lambda _: SuffixAutomatonDrafter(),
    "draft_model": _draft_model,
    "early_exit": _early_exit,
    "mtp": _mtp,
    "auto": _auto,
}


# Options that mean something to some drafters only.
_SERVES = {
    "draft_model": ("draft_model", "auto"), "exit_layer": ("early_exit",), "shortlist": ("mtp", "auto"),
    "head": ("mtp", "auto"),
}  # fmt: skip


def check_name(name: str) -> None:
    """Refuse a drafter that no table and no entry point knows; raises ``OptionError`` naming the known."""
    if name not in (*DRAFTERS, "none") and name not in entry_points(group="draftproof.drafters").names:
        raise _unknown(name)


def check_head(head: str | None, drafter: str) -> None:
    """Refuse a head folder that the drafter would not use; raises ``OptionError``."""
    if head is not None:
        _check_serves("head", drafter)


def _check_serves(option: str, drafter: str) -> None:
    users = _SERVES[option]
    if drafter not in users:
        flag = option.replace("_", "-")
        raise OptionError(f"--{flag} does nothing with drafter {drafter!r}; it is for {' and '.join(users)}")


def _unknown(name: str) -> OptionError:
    return OptionError(f"unknown drafter {name!r}; known: none, {', '.join(sorted(DRAFTERS))}")


def build_drafter(name: str, options: DrafterOptions) -> Drafter:
    """The drafter called ``name``; ``OptionError`` for an unknown one or an option it has no use for."""
    if name in DRAFTERS:
        for option in _SERVES:
            if getattr(options, option, None) is not None:  # a head is the target's, and checked before
                _check_serves(option, name)
        if options.shortlist is not None:
            head_of(options.target)
        return DRAFTERS[name](options)
    for point in entry_points(group="draftproof.drafters"):
        if point.name == name:
            made: Drafter = point.load()(options)
            return made
    raise _unknown(name)
