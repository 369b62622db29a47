"""Packaged inputs do not repeat themselves, suites fail with one clear line, prompts have exact lengths."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftproof.bench.prompts import LABELS, BenchInput, build_prompt, diverse_inputs, read_suite
from draftproof.errors import PromptError

PIECES = re.compile(r"<\w+>|\n+|[^\S\n]|[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+|[^\w\s]")
BOS = "<bos>"
ITEM = BenchInput(label="tiny", context="one two three four five", request="go on")


class FakeTokenizer:
    """Splits text into words, marks, single spaces and Chinese characters, and can spell ids back."""

    def __init__(self, *, template: str | None = "<sys>\n<user>\n{}<end>\n<bot>\n", bos: str = "") -> None:
        self.chat_template = template
        self._bos = bos
        self._ids: dict[str, int] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        marked = self._bos + text if add_special_tokens else text
        return [self._ids.setdefault(piece, len(self._ids)) for piece in PIECES.findall(marked)]

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> object:
        assert add_generation_prompt
        assert not tokenize
        assert self.chat_template is not None
        assert [message["role"] for message in conversation] == ["user"]
        return self.chat_template.replace("{}", conversation[0]["content"])

    def spell(self, ids: list[int]) -> str:
        pieces = list(self._ids)
        return "".join(pieces[i] for i in ids)


def most_repeats(units: Sequence[str], n: int = 8) -> int:
    """How often the commonest run of ``n`` units occurs."""
    return max(Counter(tuple(units[i : i + n]) for i in range(len(units) - n + 1)).values())


def suite(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


def test_most_repeats_sees_a_repetition() -> None:
    assert most_repeats("abcdefghi") == 1
    assert most_repeats("abcdefgh" * 3) == 3


def test_diverse_inputs_are_the_twelve_labels_in_order() -> None:
    expected = "news dialogue code recipe poem question maths table german french spanish chinese"
    assert " ".join(LABELS) == expected
    assert tuple(item.label for item in diverse_inputs()) == LABELS


def test_no_packaged_file_is_left_over() -> None:
    folder = Path(sys.modules["draftproof.bench.prompts"].__file__ or "").parent / "texts"
    assert {path.name for path in folder.iterdir()} == {f"{label}.txt" for label in LABELS}


@pytest.mark.parametrize("item", diverse_inputs(), ids=LABELS)
def test_packaged_input_is_whole_and_long_enough(item: BenchInput) -> None:
    # A stand-in for tokens: a subword vocabulary splits some words, and joins few marks.
    units = [piece for piece in PIECES.findall(item.context) if piece.strip()]
    assert len(units) >= 640
    assert item.request
    assert "\n" not in item.request
    assert "\n---" not in item.context


@pytest.mark.parametrize("item", diverse_inputs(), ids=LABELS)
def test_packaged_context_does_not_repeat_itself(item: BenchInput) -> None:
    assert most_repeats(list(item.context) if item.label == "chinese" else item.context.split()) <= 2
    assert most_repeats([piece for piece in PIECES.findall(item.context) if piece.strip()]) <= 2


def test_packaged_inputs_differ() -> None:
    assert len({item.context for item in diverse_inputs()}) == len(LABELS)
    assert len({item.request for item in diverse_inputs()}) == len(LABELS)


def test_packaged_code_is_python() -> None:
    code = next(item for item in diverse_inputs() if item.label == "code")
    compile(code.context, "code.txt", "exec")


def test_packaged_table_has_as_many_cells_in_every_row() -> None:
    table = next(item for item in diverse_inputs() if item.label == "table")
    assert {row.count(",") for row in table.context.splitlines()} == {9}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("prompt_len", [256, 512, 640])
@pytest.mark.parametrize("item", diverse_inputs(), ids=LABELS)
def test_packaged_prompt_has_exactly_the_asked_length(item: BenchInput, prompt_len: int, chat: bool) -> None:
    tokenizer = FakeTokenizer(bos=BOS)
    ids = build_prompt(item, tokenizer, prompt_len, chat)
    assert len(ids) == prompt_len
    head, tail = ("<sys>\n<user>\n", "<end>\n<bot>\n") if chat else (BOS, "")
    text = tokenizer.spell(ids)
    assert text.startswith(head)
    assert text.endswith("\n\n" + item.request + tail)
    kept = text.removeprefix(head).removesuffix("\n\n" + item.request + tail)
    assert kept
    assert item.context.startswith(kept)


def test_plain_prompt_keeps_the_beginning_of_the_context() -> None:
    tokenizer = FakeTokenizer()
    assert tokenizer.spell(build_prompt(ITEM, tokenizer, 7, chat=False)) == "one two\n\ngo on"


def test_plain_prompt_starts_with_bos_where_the_tokenizer_adds_one() -> None:
    tokenizer = FakeTokenizer(bos=BOS)
    assert tokenizer.spell(build_prompt(ITEM, tokenizer, 8, chat=False)) == "<bos>one two\n\ngo on"


def test_chat_prompt_is_the_template_around_the_cut_text() -> None:
    tokenizer = FakeTokenizer(template="<user>{}<end>", bos=BOS)
    assert tokenizer.spell(build_prompt(ITEM, tokenizer, 9, chat=True)) == "<user>one two\n\ngo on<end>"


def test_longest_and_shortest_prompt_of_an_input() -> None:
    tokenizer = FakeTokenizer()
    assert tokenizer.spell(build_prompt(ITEM, tokenizer, 13, chat=False)) == ITEM.context + "\n\ngo on"
    assert tokenizer.spell(build_prompt(ITEM, tokenizer, 4, chat=False)) == "\n\ngo on"


def test_request_that_does_not_fit_is_refused_with_the_tokens_it_needs() -> None:
    with pytest.raises(PromptError, match=r"^tiny: the request needs 4 tokens, the prompt length is 3$"):
        build_prompt(ITEM, FakeTokenizer(), 3, chat=False)
    with pytest.raises(PromptError, match=r"^tiny: the request needs 6 tokens, the prompt length is 5$"):
        build_prompt(ITEM, FakeTokenizer(template="<user>{}<end>"), 5, chat=True)


def test_context_too_short_for_the_prompt_is_refused() -> None:
    message = r"^tiny: context and request give 13 tokens, the prompt length is 14$"
    with pytest.raises(PromptError, match=message):
        build_prompt(ITEM, FakeTokenizer(), 14, chat=False)


@pytest.mark.parametrize("prompt_len", [1, 100])
def test_bare_prompt_is_used_whole(prompt_len: int) -> None:
    item = BenchInput(label="own", context="", request="say it all")
    tokenizer = FakeTokenizer(template="<user>{}<end>", bos=BOS)
    assert tokenizer.spell(build_prompt(item, tokenizer, prompt_len, chat=False)) == "<bos>say it all"
    assert tokenizer.spell(build_prompt(item, tokenizer, prompt_len, chat=True)) == "<user>say it all<end>"


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(PromptError, match=r"^own: the prompt is empty$"):
        build_prompt(BenchInput(label="own", context="", request=" \n"), FakeTokenizer(), 8, chat=False)


def test_chat_without_a_template_is_refused() -> None:
    with pytest.raises(PromptError, match=r"^the tokenizer has no chat template"):
        build_prompt(ITEM, FakeTokenizer(template=None), 8, chat=True)


@pytest.mark.parametrize("template", ["<user>", "<user>{}<again>{}"])
def test_template_that_does_not_show_the_text_once_is_refused(template: str) -> None:
    with pytest.raises(PromptError, match=r"does not show the user's text exactly once"):
        build_prompt(ITEM, FakeTokenizer(template=template), 8, chat=True)


def test_suite_reads_both_kinds_of_line_in_order(tmp_path: Path) -> None:
    path = suite(
        tmp_path,
        {"label": "b", "prompt": "Tell me."},
        "",
        '{"label": "a", "context": "Some\u2028text.", "request": "Go on.", "note": 1}',
    )
    assert read_suite(path) == (
        BenchInput(label="b", context="", request="Tell me."),
        BenchInput(label="a", context="Some\u2028text.", request="Go on."),
    )


def test_suite_with_a_byte_order_mark_and_windows_line_ends_is_read(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"label": "a", "prompt": "x"}\r\n{"label": "b", "prompt": "y"}\r\n')
    assert [item.label for item in read_suite(str(path))] == ["a", "b"]


def test_missing_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"^no suite file at .*absent\.jsonl$"):
        read_suite(tmp_path / "absent.jsonl")


def test_unreadable_suite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"cannot be read: Is a directory$"):
        read_suite(tmp_path)


def test_suite_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "suite.jsonl"
    path.write_bytes(b'{"label": "caf\xe9"}')
    with pytest.raises(PromptError, match=r"suite\.jsonl is not UTF-8 text: byte 14 cannot be decoded$"):
        read_suite(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_suite_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(PromptError, match=r"suite\.jsonl is empty: expected one JSON object a line$"):
        read_suite(suite(tmp_path, content))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'label'}", r"not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[" * 100_000, r"not JSON that can be read: nested too deeply"),
        ("[1]", r"expected a JSON object, found list"),
        ({"prompt": "x"}, r"key 'label' is missing"),
        ({"label": "b"}, r"key 'context' is missing \(a line has 'prompt', or 'context' and 'request'\)"),
        ({"label": "b", "context": "x"}, r"key 'request' is missing \(.*\)"),
        ({"label": "b", "request": "x"}, r"key 'context' is missing \(.*\)"),
        ({"label": "b", "prompt": "x", "request": "y"}, r"give either 'prompt' or .* not both"),
        ({"label": 7, "prompt": "x"}, r"'label' must be a non-empty string"),
        ({"label": "b", "prompt": " "}, r"'prompt' must be a non-empty string"),
        ({"label": "a", "prompt": "x"}, r"label 'a' was used on line 1; labels must differ"),
    ],
)
def test_bad_line_is_refused_with_its_number(tmp_path: Path, line: object, message: str) -> None:
    path = suite(tmp_path, {"label": "a", "prompt": "fine"}, "", line)
    with pytest.raises(PromptError, match=rf"suite\.jsonl, line 3: {message}$") as caught:
        read_suite(path)
    assert "\n" not in str(caught.value)


def test_module_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, draftproof.bench.prompts; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    path = ":".join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": path}
    )
    assert done.stdout.strip() == "[]"
