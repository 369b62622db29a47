"""Shortlists from a corpus: what is counted, ranked and covered, and files that say how they were made."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from draftproof.drafters.shortlist import read_shortlist
from draftproof.errors import ModelFileError, OptionError, ShardError, UsageError
from draftproof.heads import shortlist as lists
from draftproof.heads.shortlist import Counts, Vocabulary
from draftproof.models.load import load_tokenizer
from draftproof.wire import canonical, tokens_sha256

ANSWERS = [
    ("train", "poem", "en", "aab"),
    ("train", "code", "de", "abc"),
    ("held-out", "poem", "en", "abz"),
    ("held-out", "code", "en", "zz"),
    ("held-out", "code", "de", "aaaaa"),
]


@pytest.fixture
def model(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("llama")


def ids_of(model: Path, text: str) -> list[int]:
    return list(load_tokenizer(model).encode(text))


def test_answers_alone_are_counted_by_split(model: Path, answered: Callable[..., Path]) -> None:
    a, b, c, z = ids_of(model, "a b c z"[::2])
    counts = lists.count_corpus(answered(ANSWERS), Vocabulary.of(model))
    assert counts.train == Counter({a: 3, b: 2, c: 1})
    assert counts.held_out == {
        ("poem", "en"): Counter({a: 1, b: 1, z: 1}), ("code", "en"): Counter({z: 2}),
        ("code", "de"): Counter({a: 5}),
    }  # fmt: skip
    assert counts.num_held_out == 10
    assert 7 not in counts.train, "the prompt is not counted"


def test_rows_that_were_removed_do_not_count(model: Path, answered: Callable[..., Path]) -> None:
    counts = lists.count_corpus(answered(ANSWERS, removed_rows=[1, 4]), Vocabulary.of(model))
    assert counts.train.total() == 3
    assert counts.num_held_out == 5


def test_special_and_end_tokens_are_always_in(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_folder("llama", eos_token_id=[11, 280])
    vocabulary = Vocabulary.of(model)
    assert (vocabulary.size, vocabulary.always) == (288, (11, 280))
    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens({"bos_token": tokenizer.convert_ids_to_tokens(3)})
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text((model / name).read_text())
    assert Vocabulary.of(tmp_path).always == (3, 11, 280)
    (tmp_path / "generation_config.json").unlink()
    assert Vocabulary.of(tmp_path).always == (3, 11, 280), "the configuration names them, too"
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"cannot read .*generation_config\.json"):
        Vocabulary.of(tmp_path)


VOCABULARY = Vocabulary(size=10, always=(9,), text=lambda _: "")
COUNTS = Counts(
    train=Counter({4: 5, 2: 3, 7: 3}),
    held_out={("poem", "en"): Counter({4: 6, 1: 2}), ("code", "de"): Counter({9: 1, 7: 1})},
)


def test_the_order_and_what_its_beginnings_cover() -> None:
    ranking = lists.rank(COUNTS, VOCABULARY, [6, 2, 3, 2, 10])
    assert ranking.order == (9, 4, 2, 7, 0, 1, 3, 5, 6, 8)
    assert ranking.sizes == (2, 3, 6, 10)
    assert ranking.ids(3) == (2, 4, 9)
    assert ranking.num_seen == 3
    assert ranking.whole.num_tokens == 10
    assert ranking.whole.shares == (0.7, 0.7, 1.0, 1.0)
    assert ranking.by_category["poem"].shares == (0.75, 0.75, 1.0, 1.0)
    assert ranking.by_category["code"].shares == (0.5, 0.5, 1.0, 1.0)
    assert list(ranking.by_language) == ["de", "en"]
    told = ranking.summary()
    assert told["by_language"]["de"] == {"num_tokens": 2, "shares": [0.5, 0.5, 1.0, 1.0]}
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize(
    ("size", "told"), [(0, "no room for the 1 always kept"), (11, "--size 11 is more than the model's 10")]
)
def test_sizes_that_cannot_be(size: int, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        lists.rank(COUNTS, VOCABULARY, [4, size])


def test_default_sizes_are_smaller_than_the_vocabulary() -> None:
    assert lists.default_sizes(49152) == (2048, 4096, 8192, 16384)
    assert lists.default_sizes(8192) == (2048, 4096)
    with pytest.raises(OptionError, match="only 288 ids: name sizes"):
        lists.default_sizes(288)


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_a_corpus_without_one_of_the_splits(model: Path, answered: Callable[..., Path], split: str) -> None:
    corpus = answered([row for row in ANSWERS if row[0] == split])
    other = {"train": "held-out", "held-out": "train"}[split]
    with pytest.raises(OptionError, match=f"holds no {other} answers"):
        lists.count_corpus(corpus, Vocabulary.of(model))


def test_another_tokenizers_corpus_is_refused(model: Path, answered: Callable[..., Path]) -> None:
    corpus, whole = answered(ANSWERS), Vocabulary.of(model)
    small = Vocabulary(size=8, always=(), text=whole.text)
    other = Vocabulary(size=288, always=(), text=lambda ids: whole.text([i + 1 for i in ids]))
    for vocabulary in (small, other):
        with pytest.raises(OptionError, match="another tokenizer"):
            lists.count_corpus(corpus, vocabulary)


def test_damage_is_named(model: Path, answered: Callable[..., Path], tmp_path: Path) -> None:
    corpus = answered(ANSWERS)
    (corpus / "shard-00000.safetensors").write_bytes(b"no")
    with pytest.raises(ShardError, match="was changed"):
        lists.count_corpus(corpus, Vocabulary.of(model))
    with pytest.raises(UsageError, match="no corpus in"):
        lists.count_corpus(tmp_path / "nothing", Vocabulary.of(model))


def test_progress_is_told(model: Path, answered: Callable[..., Path]) -> None:
    heard: list[tuple[str, int, int]] = []
    lists.count_corpus(answered(ANSWERS), Vocabulary.of(model), lambda *told: heard.append(told))
    assert heard == [("counting tokens", 0, 5)]


def test_which_corpus_it_was(answered: Callable[..., Path]) -> None:
    corpus = answered(ANSWERS)
    facts = lists.corpus_facts(corpus)
    assert facts == {
        "folder": str(corpus), "status": "complete", "weights": "w",
        "manifest_sha256": hashlib.sha256((corpus / "manifest.json").read_bytes()).hexdigest(),
    }  # fmt: skip


def test_places(tmp_path: Path) -> None:
    assert lists.place_of(Path("a/ids.json"), 2048, 1) == Path("a/ids.json")
    assert lists.place_of(Path("a/ids.json"), 2048, 3) == Path("a/ids-2048.json")
    with pytest.raises(OptionError, match=r"is a folder: name a file with --out, such as .*shortlist\.json"):
        lists.check_out(tmp_path)


def test_the_file_is_what_the_option_reads_and_says_how_it_was_made(tmp_path: Path) -> None:
    beside = lists.write_shortlist(tmp_path / "deep" / "shortlist.json", (1, 5, 9), {"corpus": "c"})
    assert read_shortlist(tmp_path / "deep" / "shortlist.json") == (1, 5, 9)
    assert beside == tmp_path / "deep" / "shortlist.provenance.json"
    document = json.loads(beside.read_text())
    digest = document.pop("hash")
    assert digest == hashlib.sha256(canonical(document).encode()).hexdigest()
    assert document["ids_sha256"] == tokens_sha256((1, 5, 9))
    assert (document["corpus"], document["num_ids"], document["kind"]) == ("c", 3, "shortlist")
