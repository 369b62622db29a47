"""Which head wins: time decides where it shows a difference, acceptance where it does not."""

from __future__ import annotations

import pytest

from draftproof.heads.ranking import Decoded, Heat, standings


def decoded(milliseconds: float, rounds: tuple[tuple[int, int, int], ...] = ()) -> Decoded:
    return Decoded(duration_ns=int(milliseconds * 1e6), num_tokens=60, rounds=rounds)


def drafted(accepted: int, milliseconds: float) -> Decoded:
    """Every round accepts as many of three."""
    return decoded(milliseconds, ((3, accepted, accepted + 1),) * 10)


def heats(**candidates: list[Decoded]) -> list[Heat]:
    """A heat a place of the lists; serial takes 100 ms."""
    return [
        Heat(
            label=str(place), category=("news", "poem")[place % 2], language="en", serial=decoded(100),
            candidates=dict(zip(candidates, found, strict=True)),
        )
        for place, found in enumerate(zip(*candidates.values(), strict=True))
    ]  # fmt: skip


def test_figures_of_one_decode() -> None:
    one = decoded(1, ((3, 0, 1), (3, 2, 3), (2, 2, 3), (3, 1, 1)))
    assert one.acceptance_length == 2.0
    assert one.first_acceptance == 0.75
    assert (decoded(1).acceptance_length, decoded(1).first_acceptance) == (None, None)


def test_a_candidate_that_never_drafted_gains_nothing() -> None:
    (only,) = standings(heats(idle=[decoded(100)] * 6))
    assert (only.acceptance_length.value, only.mean_length, only.first_acceptance) == (1.0, 1.0, 0.0)
    assert only.speedup.value == pytest.approx(1.0)


def test_figures_of_a_candidate() -> None:
    (one,) = standings(heats(one=[drafted(1, 50), drafted(2, 40)] * 4))
    assert one.acceptance_length.value == 2.5
    assert one.acceptance_length.interval == (2.0, 3.0)
    assert one.by_kind == {"news": 2.0, "poem": 3.0}
    assert one.worst_kind == ("news", 2.0)
    assert one.speedup.value == pytest.approx((2.0 * 2.5) ** 0.5)
    assert one.against_fastest.value == 1.0
    assert not one.is_slower
    assert one.row()["speedup"]["value"] == one.speedup.value


def test_the_clearly_slower_one_loses_although_it_accepts_more() -> None:
    found = standings(heats(small=[drafted(1, 50)] * 8, big=[drafted(3, 70)] * 8))
    assert [(one.name, one.is_slower) for one in found] == [("small", False), ("big", True)]
    assert found[1].against_fastest.value == pytest.approx(50 / 70)


def test_where_time_shows_nothing_acceptance_decides() -> None:
    noisy = [drafted(2, milliseconds) for milliseconds in (45, 60, 44, 58, 47, 61, 46, 59)]
    found = standings(heats(quick=[drafted(1, 51)] * 8, right=noisy))
    assert [one.name for one in found] == ["right", "quick"]
    assert not any(one.is_slower for one in found)


def test_with_few_prompts_nothing_is_shown_to_be_slower() -> None:
    found = standings(heats(small=[drafted(1, 50)] * 4, big=[drafted(3, 90)] * 4))
    assert [one.name for one in found] == ["big", "small"]
    assert found[0].speedup.interval is None
