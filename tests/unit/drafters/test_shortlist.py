"""Shortlists: read from files as people write them, counted from texts, refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof.drafters.shortlist import (
    DEFAULT_FILE,
    by_frequency,
    default_shortlist,
    ranked,
    read_shortlist,
)
from draftproof.errors import OptionError


@pytest.mark.parametrize("text", ["[3, 1, 2]", " [3,\n1, 2]\n", "3\n1\n2\n", "3 1\t2", "\n3\n\n1\n2"])
def test_a_json_list_or_one_id_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "ids").write_text(text)
    assert read_shortlist(tmp_path / "ids") == (3, 1, 2)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "ids from 0 on, at least one"),
        (b"[]", "ids from 0 on, at least one"),
        (b"[1, -2]", "ids from 0 on"),
        (b"[1, true]", "ids from 0 on"),
        (b"[1, 2.0]", "ids from 0 on"),
        (b"[1, 2", "a JSON list of ids, or one id a line"),
        (b"one two", "a JSON list of ids, or one id a line"),
        (b"\xff\xfe1", "cannot read the shortlist"),
    ],
)
def test_files_that_hold_no_ids_are_refused(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "ids").write_bytes(content)
    with pytest.raises(OptionError, match=told):
        read_shortlist(tmp_path / "ids")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot read the shortlist .*nothing"):
        read_shortlist(tmp_path / "nothing")


class TestByFrequency:
    TEXTS = ([5, 5, 7, 9], [5, 7, 1], [2])

    def test_the_most_frequent_in_ascending_order(self) -> None:
        assert by_frequency(self.TEXTS, 2) == (5, 7)

    def test_equal_counts_go_to_the_lower_id(self) -> None:
        assert by_frequency(self.TEXTS, 4) == (1, 2, 5, 7)

    def test_fewer_where_there_are_fewer(self) -> None:
        assert by_frequency(self.TEXTS, 99) == (1, 2, 5, 7, 9)

    def test_some_are_always_kept_and_count(self) -> None:
        assert by_frequency(self.TEXTS, 2, always=[100]) == (5, 100)
        assert by_frequency(self.TEXTS, 2, always=[5]) == (5, 7)

    @pytest.mark.parametrize(("size", "always"), [(0, ()), (-1, ()), (1, (3, 4))])
    def test_no_room(self, size: int, always: tuple[int, ...]) -> None:
        with pytest.raises(OptionError, match="no room"):
            by_frequency(self.TEXTS, size, always)


class TestRanked:
    def test_by_count_then_by_id_with_those_never_seen_last(self) -> None:
        assert ranked({3: 1, 5: 9, 1: 1}, range(7)) == (5, 1, 3, 0, 2, 4, 6)

    def test_what_is_always_kept_comes_first_and_once(self) -> None:
        assert ranked({3: 1, 5: 9}, range(6), always=[4, 3, 4]) == (4, 3, 5, 0, 1, 2)

    def test_every_id_once(self) -> None:
        assert sorted(ranked({9: 2, 40: 1}, range(50), always=[49, 0])) == list(range(50))


class TestDefaultShortlist:
    def test_none_where_the_folder_names_none(self, tmp_path: Path) -> None:
        assert default_shortlist(tmp_path, 10) is None

    def test_its_ids(self, tmp_path: Path) -> None:
        (tmp_path / DEFAULT_FILE).write_text("[2, 9]")
        assert default_shortlist(tmp_path, 10) == (2, 9)

    def test_ids_the_model_lacks_name_the_file(self, tmp_path: Path) -> None:
        (tmp_path / DEFAULT_FILE).write_text("[2, 10]")
        with pytest.raises(OptionError, match=r"shortlist\.json holds the id 10, but the model has 10"):
            default_shortlist(tmp_path, 10)

    def test_a_damaged_one_is_not_passed_over(self, tmp_path: Path) -> None:
        (tmp_path / DEFAULT_FILE).write_text("[2, ")
        with pytest.raises(OptionError, match=r"shortlist\.json must hold a JSON list"):
            default_shortlist(tmp_path, 10)
