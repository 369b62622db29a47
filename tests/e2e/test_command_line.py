"""``python -m draftproof`` as a process: results on stdout, one line on stderr for bad input, Ctrl-C."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from draftproof import cli
from draftproof.folder import check_seal
from draftproof.models.catalog import CATALOG, DEFAULT_MODEL, pulled_path
from draftproof.models.stock import StockModel
from draftproof.record import Leg, Machine, Plan, Trace
from draftproof.wire import check_chain, decode

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTION = "What is the capital of France? Answer with one word."
NUM_NEW = 24
Done = subprocess.CompletedProcess[str]


def environment(**changes: str) -> dict[str, str]:
    """The user's, without what tests/conftest.py set to keep the test process quiet."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TRANSFORMERS_VERBOSITY", "COLUMNS")}
    return {**kept, **changes}


def run(*arguments: str | bytes, stdin: bytes | None = None, cwd: Path | None = None, **env: str) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "draftproof", *arguments], input=stdin, capture_output=True, check=False,
        env=environment(**env), timeout=300, cwd=cwd, stdin=subprocess.DEVNULL if stdin is None else None,
    )  # fmt: skip
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8")
    )


def check_refusal(code: int, out: str, err: str, *told: str) -> None:
    """Exit code 2, nothing on stdout, exactly one line on stderr, which says what was wrong."""
    assert "Traceback" not in err
    assert code == 2, err
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("draftproof: ")
    assert err.endswith("\n")
    for word in told:
        assert word in line


def refused(done: Done, *told: str) -> None:
    check_refusal(done.returncode, done.stdout, done.stderr, *told)


@pytest.fixture(scope="module")
def stock_ids(model_folder: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    return list(StockModel(model_folder, torch.bfloat16, torch.device("cpu")).generate(prompt, NUM_NEW))


@pytest.fixture(scope="module")
def stock_text(model_folder: Path, stock_ids: list[int]) -> str:
    return str(AutoTokenizer.from_pretrained(model_folder).decode(stock_ids, skip_special_tokens=True))


@pytest.fixture
def broken_folder(model_folder: Path, tmp_path: Path) -> Callable[..., str]:
    """A copy of the model's folder without its weights, or without other files, with ``files`` added.

    Its shapes are the real model's, so that nothing has to be probed.
    """

    def make(*without: str, **files: bytes) -> str:
        folder = tmp_path / f"broken{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for file in model_folder.iterdir():
            if file.name not in ("model.safetensors", *without):
                shutil.copy(file, folder)
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_bytes(content)
        return str(folder)

    return make


class TestGenerate:
    def test_text(self, stock_text: str) -> None:
        done = run("generate", QUESTION, "--max-new-tokens", str(NUM_NEW))
        assert (done.returncode, done.stdout, done.stderr) == (0, stock_text + "\n", "")

    def test_json_is_one_document_and_nothing_else(self, stock_ids: list[int], stock_text: str) -> None:
        done = run("generate", "-", "--max-new-tokens", str(NUM_NEW), "--json", stdin=QUESTION.encode())
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
        document = json.loads(done.stdout)
        assert document["token_ids"] == stock_ids
        assert document["text"] == stock_text
        assert list(decode(Trace, document["trace"]).token_ids) == stock_ids
        assert document["claim"] in ("bitwise", "guarded")
        assert document["finish_reason"] in ("stop", "length")

    def test_statistics_go_to_stderr(self, stock_text: str) -> None:
        done = run(
            "generate", QUESTION, "--max-new-tokens", str(NUM_NEW), "--stats", "--drafter", "suffix",
            "--depth", "3", "--color",
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, stock_text + "\n")  # no colours in a pipe
        assert "tokens per verification" in done.stderr
        assert "Traceback" not in done.stderr

    def test_ctrl_c_keeps_the_text_so_far(self, model_folder: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftproof", "generate", "Tell me a very long story.", "--max-new-tokens",
             "2000", "--min-new-tokens", "2000"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            begun = b""
            while len(begun) < 24:  # text arrives while the rest is still to be decoded
                piece = os.read(process.stdout.fileno(), 64)
                assert piece, process.stderr.read()
                begun += piece
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            rest, err = process.communicate(timeout=60)
        text = (begun + rest).decode()
        assert process.returncode == 130
        assert text.endswith("\n")
        assert len(text.split()) > 3
        assert len(text) < 6000
        assert err.decode() == ""

    def test_ctrl_c_with_json_is_still_one_document(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftproof", "generate", "Tell me a very long story.", "--max-new-tokens",
             "3000", "--min-new-tokens", "3000", "--json", "--stats"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        )  # fmt: skip
        with process:
            wait_for_weights(process.pid)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in err.decode()
        assert not out or json.loads(out)["finish_reason"] == "interrupted"

    def test_a_reader_that_goes_away_is_no_traceback(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "draftproof", "generate", "Tell me a long story.", "--max-new-tokens",
             "200", "--min-new-tokens", "200"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
        )  # fmt: skip
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            os.read(process.stdout.fileno(), 8)
            process.stdout.close()
            err = process.stderr.read().decode()
            process.wait(timeout=60)
        assert err == ""
        assert process.returncode not in (0, 2)


def wait_for_weights(pid: int) -> None:
    """Until the process is past its imports and uses the time of a decode; a second of grace after."""
    fields = ""
    ticks = os.sysconf("SC_CLK_TCK")
    while True:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        except OSError:
            return
        used = sum(map(int, fields.split()[11:13])) / ticks
        if used > 5 or fields.split()[0] == "Z":
            return
        signal.sigtimedwait([], 0.2)


class TestOthers:
    def test_doctor_json(self) -> None:
        done = run("doctor", "--json")
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
        document = json.loads(done.stdout)
        assert decode(Plan, document["plan"]).claim in ("bitwise", "guarded")
        assert decode(Machine, document["machine"]).torch == torch.__version__
        assert document["advice"].startswith("Speculation")

    def test_models_json(self) -> None:
        done = run("models", "--json")
        assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
        paths = {model["name"]: model["path"] for model in json.loads(done.stdout)}
        assert set(paths) == set(CATALOG)
        assert paths[DEFAULT_MODEL] == str(pulled_path(CATALOG[DEFAULT_MODEL]))

    def test_a_tiny_bench(self, tmp_path: Path) -> None:
        done = run(
            "bench", "--labels", "question", "--pairs", "1", "--max-new-tokens", "12", "--prompt-len", "120",
            "--drafter", "suffix", "--out", str(tmp_path / "run"), cwd=tmp_path,
        )  # fmt: skip
        text = " ".join(done.stdout.split())
        assert "24 tokens checked against stock, 0 mismatched" in text, done.stderr
        assert "audit: PASS" in text
        assert f"report: {tmp_path / 'run' / 'report.html'}" in text
        assert done.stderr.splitlines() == [f"raw legs, traces and tokens: {tmp_path / 'run'}"]
        rows = {
            name: [json.loads(x) for x in (tmp_path / "run" / name).read_text().splitlines()]
            for name in ("legs.jsonl", "trace.jsonl", "tokens.jsonl")
        }
        legs = [decode(Leg, row) for row in rows["legs.jsonl"]]
        assert [leg.arm for leg in legs] == ["suffix", "serial", "stock"], (
            "the judged arm sees the prompt first"
        )
        assert len({leg.tokens_sha256 for leg in legs}) == 1
        assert [leg.num_tokens for leg in legs] == [12] * 3
        check_chain(rows["trace.jsonl"])
        assert len({tuple(row["token_ids"]) for row in rows["tokens.jsonl"]}) == 1
        document = json.loads((tmp_path / "run" / "run.json").read_text())
        assert document["provenance"]["argv"][0] == "bench"
        outcome = document["results"]["verdict"]["outcome"]
        # One pair of 12 tokens may well be slower on a busy machine, or too noisy to show a speed at all.
        assert outcome in ("pass", "tie", "fail", "void")
        assert (document["results"]["speedup"] is None) == (outcome == "void")
        assert done.returncode == (0 if outcome in ("pass", "tie") else 1)
        assert check_seal(tmp_path / "run") == []
        assert (tmp_path / "runs" / "ledger.jsonl").exists()


class TestBadInput:
    """Each in a process of its own."""

    def test_an_unknown_model(self) -> None:
        done = run("generate", "hi", "--model", "smolm2-135m")
        refused(done, "'smolm2-135m'", f"did you mean '{DEFAULT_MODEL}'")

    def test_a_truncated_gguf(self, tmp_path: Path) -> None:
        whole = pulled_path(CATALOG[DEFAULT_MODEL])
        assert whole is not None
        file = tmp_path / "cut.gguf"
        with whole.open("rb") as stream:
            file.write_bytes(stream.read(3 << 20))
        refused(run("generate", "hi", "--model", str(file), DRAFTPROOF_CACHE=str(tmp_path / "c")), str(file))
        left = [path for path in (tmp_path / "c").rglob("*") if path.is_file()]
        assert left == []

    def test_an_empty_prompt(self) -> None:
        refused(run("generate", ""), "prompt is empty")

    def test_a_prompt_longer_than_the_context(self) -> None:
        done = run("generate", "-", stdin=b"hello there " * 4500)
        refused(done, "8192", "shorten")

    def test_bytes_that_are_not_utf_8(self) -> None:
        refused(run("generate", "-", stdin=b"caf\xe9"), "UTF-8")

    def test_an_argument_that_is_not_utf_8(self) -> None:
        refused(run("generate", b"caf\xe9"), "UTF-8")

    def test_a_draft_model_with_another_vocabulary(self, tiny_folder: Any) -> None:
        folder = str(tiny_folder("llama", torch.bfloat16))
        refused(run("generate", "hi", "--drafter", "draft_model", "--draft-model", folder), "vocabulary")

    def test_an_unknown_option(self) -> None:
        refused(run("generate", "hi", "--frobnicate"), "--frobnicate", "--help")

    def test_a_bench_of_an_unknown_drafter(self, tmp_path: Path) -> None:
        done = run(
            "bench", "--drafter", "psychic", "--labels", "question", "--prompt-len", "120", "--out",
            str(tmp_path / "run"),
        )  # fmt: skip
        refused(done, "'psychic'")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run ``main`` in this process, which is quicker, and check that it refuses."""

    def runner(*arguments: str, told: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(sys, "argv", ["draftproof", *arguments])
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capfd.readouterr()
        assert isinstance(stop.value.code, int)
        check_refusal(stop.value.code, captured.out, captured.err, *told)

    return runner


class TestMoreBadInput:
    """The same promise, checked in this process."""

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--depth", "-1"], "depth must be 0 or more, got -1"),
            (["--depth", "32"], "31"),
            (["--depth", "deep"], "'deep'"),
            (["--depth", "1.5"], "depth"),
            (["--max-new-tokens", "0"], "max_new_tokens"),
            (["--max-new-tokens", "-3"], "max_new_tokens"),
            (["--max-new-tokens", "8192"], "8192"),
            (["--dtype", "int4"], "int4"),
            (["--device", "abacus"], "abacus"),
            (["--device", "meta"], "meta"),
            (["--claim", "certain"], "certain"),
            (["--threads", "0"], "threads"),
            (["--drafter", "psychic"], "'psychic'"),
            (["--drafter", "draft_model"], "--draft-model"),
            (["--drafter", "early_exit", "--exit-layer", "30"], "1 to 29"),
            (["--drafter", "early_exit", "--exit-layer", "0"], "1 to 29"),
            (["--drafter", "early_exit", "--exit-layer", "-1"], "1 to 29"),
            (["--draft-model", "smolm2"], "smolm2"),
            (["--repetition-penalty", "0"], "penalty"),
            (["--repetition-penalty", "-1"], "penalty"),
            (["--repetition-penalty", "nan"], "penalty"),
            (["--min-new-tokens", "-1"], "min"),
            (["--no-repeat-ngram-size", "-1"], "ngram"),
            (["--stop", ""], "stop"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_options_of_generate(self, arguments: list[str], told: str, here: Callable[..., None]) -> None:
        here("generate", "hi", *arguments, told=(told,))

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (["--pairs", "0"], "pairs"),
            (["--drafter", "none"], "serial"),
            (["--labels", "nonsense"], "'nonsense'"),
            (["--prompt-len", "5"], "prompt length is 5"),
            (["--prompt-len", "0"], "prompt length is 0"),
            (["--prompt-len", "7000"], "prompt length is 7000"),
            (["--max-new-tokens", "0"], "max_new_tokens"),
            (["--claim", "certain"], "certain"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_options_of_bench(
        self, arguments: list[str], told: str, here: Callable[..., None], tmp_path: Path
    ) -> None:
        here("bench", "--out", str(tmp_path / "run"), *arguments, told=(told,))
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (b"", "empty"),
            (b'{"label": "a", "prompt": "b"}\n{oh no}', "line 2: not JSON"),
            (b'{"label": "a"}', "prompt"),
            (b'["a"]', "object"),
            (b'{"label": "a", "prompt": " "}', "prompt"),
            (b'{"label": "a", "prompt": "x"}\n{"label": "a", "prompt": "y"}', "labels must differ"),
            (b"\xff\xfe", "UTF-8"),
        ],
    )
    def test_suites(self, content: bytes, told: str, here: Callable[..., None], tmp_path: Path) -> None:
        suite = tmp_path / "suite.jsonl"
        suite.write_bytes(content)
        here("bench", "--suite", str(suite), "--out", str(tmp_path / "run"), told=("suite.jsonl", told))

    def test_a_suite_that_is_no_file(self, here: Callable[..., None], tmp_path: Path) -> None:
        here("bench", "--suite", str(tmp_path), told=(str(tmp_path),))
        here("bench", "--suite", str(tmp_path / "none.jsonl"), told=("none.jsonl",))

    def test_a_bench_prompt_longer_than_the_context(self, here: Callable[..., None], tmp_path: Path) -> None:
        suite = tmp_path / "suite.jsonl"
        suite.write_text(json.dumps({"label": "long", "prompt": "hello there " * 4500}))
        here("bench", "--suite", str(suite), "--out", str(tmp_path / "run"), told=("8192",))

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("", "no model ''"),
            ("smolm2", "did you mean"),
            ("~no-such-user-here/model", "no-such-user-here"),
            ("x" * 300, "xxx"),
            ("a/" * 40 + "b", "a/"),
            ("/dev/null", "/dev/null"),
            ("nul\0byte", "nul"),
        ],
        ids=["empty", "typo", "user", "long", "deep", "device", "nul"],
    )
    def test_model_names(
        self, name: str, told: str, here: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        here("generate", "hi", "--model", name, told=(told,))
        here("doctor", "--model", name, told=(told,))

    @pytest.mark.parametrize("content", [b"", b"GGU", b"GGUF", b"GGUF\x03\0\0\0" + bytes(64), b"not it"])
    def test_gguf_files(
        self, content: bytes, here: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
        file = tmp_path / "model.gguf"
        file.write_bytes(content)
        here("generate", "hi", "--model", str(file), told=("model.gguf",))

    def test_a_file_that_is_no_gguf(self, here: Callable[..., None], tmp_path: Path) -> None:
        file = tmp_path / "model.bin"
        file.write_bytes(b"GGUF")
        here("generate", "hi", "--model", str(file), told=("model.bin", ".gguf"))

    def test_weights(
        self, here: Callable[..., None], broken_folder: Callable[..., str], tmp_path: Path
    ) -> None:
        save_file({"model.norm.weight": torch.ones(576)}, tmp_path / "one")
        save_file({"model.norm.weight": torch.ones(575)}, tmp_path / "wrong")
        index = json.dumps({"weight_map": {"model.norm.weight": "part-1.safetensors"}}).encode()
        for files in (
            {},
            {"model__safetensors": b""},
            {"model__safetensors": bytes(100)},
            {"model__safetensors": (tmp_path / "one").read_bytes()},
            {"model__safetensors": (tmp_path / "wrong").read_bytes()},
            {"model__safetensors__index__json": index},
            {"model__safetensors__index__json": b"{}"},
            {"model__safetensors__index__json": b"no json"},
            {"model__safetensors__index__json": b"[1]"},
        ):
            here("generate", "hi", "--model", broken_folder(**files))

    def test_configurations(self, here: Callable[..., None], broken_folder: Callable[..., str]) -> None:
        for content in (
            b"", b"no json", b"[1]", b"{}", b'{"model_type": "no-such-type"}', b'{"model_type": 7}',
            b'{"model_type": "llama", "hidden_size": "wide"}', b"\xff",
        ):  # fmt: skip
            here("generate", "hi", "--model", broken_folder(config__json=content))

    def test_a_folder_without_a_tokenizer(
        self, here: Callable[..., None], broken_folder: Callable[..., str], model_folder: Path
    ) -> None:
        folder = broken_folder("tokenizer.json", "tokenizer_config.json")
        (Path(folder) / "model.safetensors").symlink_to(model_folder / "model.safetensors")
        here("generate", "hi", "--model", folder, told=("tokenizer", folder))

    def test_models_pull(self, here: Callable[..., None]) -> None:
        here("models", "pull", "gema-3", told=("did you mean 'gemma-3-270m'",))
        here("models", "pull", "nonsense", told=("draftproof models",))


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB without a free byte."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount, umount = shutil.which("mount"), shutil.which("umount")
    if os.geteuid() != 0 or mount is None or umount is None:
        pytest.skip("mounting a tiny file system needs root")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"mounting is not permitted here: {done.stderr.decode().strip()}")
    try:
        with pytest.raises(OSError, match="No space left") as full, (folder / "filler").open("wb") as stream:  # noqa: PT012
            while True:
                stream.write(bytes(4096))
                stream.flush()
        assert full.value.errno == errno.ENOSPC
        yield folder
    finally:
        subprocess.run([umount, "-l", str(folder)], check=True)


class TestFullDisk:
    def test_as_the_run_folder(self, full_disk: Path) -> None:
        done = run(
            "bench", "--labels", "question", "--pairs", "1", "--max-new-tokens", "4", "--prompt-len", "120",
            "--out", str(full_disk / "run"),
        )  # fmt: skip
        refused(done, "no space left", str(full_disk))

    def test_as_the_cache_when_a_model_is_pulled(
        self, full_disk: Path, here: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refused(run("generate", "hi", DRAFTPROOF_CACHE=str(full_disk)), "DRAFTPROOF_CACHE")
        monkeypatch.setenv("DRAFTPROOF_CACHE", str(full_disk))
        here("models", "pull", told=("DRAFTPROOF_CACHE",))
        here("doctor", told=("DRAFTPROOF_CACHE",))
        assert [path.name for path in full_disk.iterdir() if path.is_file()] == ["filler"]

    def test_as_the_cache_when_a_model_is_converted(
        self, full_disk: Path, here: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = str(pulled_path(CATALOG[DEFAULT_MODEL]))
        monkeypatch.setenv("DRAFTPROOF_CACHE", str(full_disk))
        here("generate", "hi", "--model", path, told=("free", str(full_disk)))

    @pytest.mark.parametrize("kind", ["gpt2", "llama"])  # measured here, and probed in a child process
    def test_as_the_cache_when_findings_are_kept(
        self, kind: str, full_disk: Path, tiny_folder: Any, here: Callable[..., None],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        folder = str(tiny_folder(kind, torch.bfloat16))
        monkeypatch.setenv("DRAFTPROOF_CACHE", str(full_disk))
        here("generate", "hi", "--model", folder, told=("no space left", str(full_disk)))

    def test_as_standard_output(self) -> None:
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "draftproof", "models", "--json"], stdout=full, stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL, check=False, env=environment(),
            )  # fmt: skip
        check_refusal(done.returncode, "", done.stderr.decode(), "No space left")
