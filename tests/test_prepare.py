"""`crosscurrent prepare`: what is written, whatever happens meanwhile, and how bad input is answered."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock
from typer.testing import CliRunner

from crosscurrent.cli.main import app
from crosscurrent.data import sources
from crosscurrent.data.prepare import prepare
from crosscurrent.data.shards import PreparedText
from crosscurrent.data.sources import LocalFiles
from tests.tiny_texts import documents_in, ending_tokenizer, ids_of, random_texts, write_jsonl

TOKENIZER = ending_tokenizer()


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_BATCH_DOCUMENTS", 4)


def prepared_from(path: Path, output: Path, **settings: Any) -> PreparedText:
    given: dict[str, Any] = {"tokenizer_name": "characters", "validation_share": 0.3, "shard_tokens": 60} | settings
    return prepare(LocalFiles([path]), TOKENIZER, output, **given)


def texts_of(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.open()]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    texts = random_texts(30)
    return write_jsonl(tmp_path / "corpus.jsonl", [*texts[:9], "", *texts[9:], texts[3], " \n"])


@pytest.fixture
def whole(corpus: Path, tmp_path: Path) -> dict[str, bytes]:
    """What comes out if nothing happens."""
    prepared_from(corpus, tmp_path / "whole")
    return contents(tmp_path / "whole")


def test_nothing_lost_nothing_added(corpus: Path, tmp_path: Path) -> None:
    texts = [text for text in texts_of(corpus) if text.strip()]
    prepared = prepared_from(corpus, tmp_path / "out")
    prepared.verify()
    train, held_out = (documents_in(prepared, split) for split in ("train", "validation"))
    assert sorted(train + held_out) == sorted(ids_of(TOKENIZER, texts))
    assert [ids for ids in ids_of(TOKENIZER, texts) if ids in train] == train  # in order
    assert train and held_out and not [ids for ids in train if ids in held_out]  # equal texts on one side
    assert len(prepared.shards["train"]) > 2
    assert prepared.manifest["left_out"] == {
        "empty": {"count": 2, "first": ["corpus.jsonl, line 10", "corpus.jsonl, line 33"]}
    }
    assert prepared.dtype == np.uint16 and prepared.eos_token_id == 0
    assert str(tmp_path) not in json.dumps(prepared.manifest)


def test_the_held_out_texts_do_not_depend_on_the_others(tmp_path: Path) -> None:
    texts = random_texts(60)
    both = write_jsonl(tmp_path / "all.jsonl", texts)
    some = write_jsonl(tmp_path / "some.jsonl", texts[40:] + texts[:5])
    first, second = prepared_from(both, tmp_path / "a"), prepared_from(some, tmp_path / "b")
    of_some = ids_of(TOKENIZER, texts[40:] + texts[:5])
    expected = [ids for ids in documents_in(first, "validation") if ids in of_some]
    assert sorted(documents_in(second, "validation")) == sorted(expected)
    share = first.num_documents("validation") / 60
    assert 0.1 < share < 0.5


def test_killed_at_every_write_and_gone_on(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """A process is killed before the first, second, ... time it makes something durable, until none is left."""
    for event in range(1, 1000):
        output = tmp_path / str(event)
        if not _is_killed(event, lambda: prepared_from(corpus, output)):  # noqa: B023
            break
        with pytest.raises(ValueError):
            if "manifest.json" not in contents(output):
                PreparedText(output)
            else:
                raise ValueError("only the progress file was left to delete")
        prepared_from(corpus, output)
        assert contents(output) == whole, event
    assert event > 3 * len(whole)


def _is_killed(event: int, work: Callable[[], object]) -> bool:
    """Whether a copy of this process that does the work is killed at that event."""
    child = os.fork()
    if child == 0:
        count = 0

        def counting(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any) -> Any:
                nonlocal count
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            return counted

        for name in ("fsync", "replace", "unlink"):
            setattr(os, name, counting(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


SLOW = """
import sys, time
from pathlib import Path
from crosscurrent.data import sources
from crosscurrent.data.prepare import prepare
from crosscurrent.data.sources import LocalFiles
from tests.tiny_texts import ending_tokenizer

class Slow(LocalFiles):
    def read(self, part, first=0):
        for document in super().read(part, first):
            time.sleep(0.05)
            yield document

if __name__ == "__main__":
    sources._BATCH_DOCUMENTS = 4
    prepare(Slow([Path(sys.argv[1])]), ending_tokenizer(), Path(sys.argv[2]), tokenizer_name="characters",
            validation_share=0.3, shard_tokens=60, num_workers=2)
"""


@pytest.mark.once
def test_killed_with_its_workers_at_work(corpus: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """kill -9 of a real process: finished shards are those of one process, no worker stays, and work goes on."""
    script, output = tmp_path / "slow.py", tmp_path / "killed"
    script.write_text(SLOW)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, script, corpus, output], env=environment, start_new_session=True, stderr=subprocess.PIPE
    )
    try:
        _wait_until(lambda: (output / "train-00001.bin").exists() or process.poll() is not None)
        assert len(_processes_of_group(process.pid)) >= 3  # with two workers
    finally:
        process.kill()
        process.wait()
    finished = {name: content for name, content in contents(output).items() if name.endswith(".bin")}
    assert finished and finished.items() <= whole.items() and len(finished) < len(whole) - 1
    _wait_until(lambda: not _processes_of_group(process.pid))
    prepared_from(corpus, output)
    assert contents(output) == whole


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _processes_of_group(group: int) -> list[str]:
    lines = subprocess.run(
        ["ps", "-eo", "pgid,stat,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = [line.split(maxsplit=2) for line in lines[1:]]
    return [args for pgid, stat, args in found if pgid == str(group) and not stat.startswith("Z")]


@pytest.mark.once
def test_wikipedia_with_the_tokenizer_of_smollm2_and_two_processes(
    smollm2_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(os.environ["CROSSCURRENT_TEST_DATA"]) / "wikipedia_30.jsonl"
    arguments = ["prepare", path, "--tokenizer", "smollm2-135m", "--validation-share", "0.1", "--shard-tokens", "50000"]
    monkeypatch.setattr("crosscurrent.models.base.load_tokenizer", {"smollm2-135m": smollm2_tokenizer}.__getitem__)
    result = run(*arguments, "--output", tmp_path / "two", "--num-workers", "2")
    assert result.exit_code == 0, result.output
    settings: dict[str, Any] = {"tokenizer_name": "smollm2-135m", "validation_share": 0.1, "shard_tokens": 50_000}
    prepared = prepare(LocalFiles([path]), smollm2_tokenizer, tmp_path / "one", **settings)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    prepared.check_tokenizer(smollm2_tokenizer)
    found = documents_in(prepared, "train") + documents_in(prepared, "validation")
    assert all(ids[-1] == smollm2_tokenizer.eos_token_id for ids in found)
    assert sorted(smollm2_tokenizer.decode(ids[:-1]) for ids in found) == sorted(texts_of(path))
    assert f"{prepared.num_tokens('train'):,} tokens" in result.stdout and "left out: none" in result.stdout


BAD_LINES: dict[str, bytes] = {
    "broken JSON": b'{"text": ',
    "field missing": b'{"txt": "a"}',
    "not a text": b'{"text": 7}',
    "half of a character": b'{"text": "a\\ud800b"}',
    "not UTF-8": b'{"text": "caf\xe9"}',
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_bad_lines_stop_or_are_counted(kind: str, corpus: Path, tmp_path: Path) -> None:
    bad = BAD_LINES[kind]
    lines = corpus.read_bytes().splitlines()
    corpus.write_bytes(b"\n".join([*lines[:2], bad, *lines[2:], *[bad] * 9]))
    with pytest.raises(ValueError, match=r"corpus\.jsonl, line 3.*--on-error skip"):
        prepared_from(corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    prepared = prepared_from(corpus, tmp_path / "out", on_error="skip")
    assert prepared.num_documents("train") + prepared.num_documents("validation") == 31
    places = ["corpus.jsonl, line 3", *(f"corpus.jsonl, line {number}" for number in range(34 + 1, 34 + 5))]
    assert prepared.manifest["left_out"][kind] == {"count": 10, "first": places}


def test_stopped_at_a_bad_line_then_told_to_skip(corpus: Path, tmp_path: Path) -> None:
    """What was finished before the bad line stays; a shard that was cut short meanwhile is made again."""
    corpus.write_text(corpus.read_text() + "{\n")
    output, expected = tmp_path / "out", tmp_path / "expected"
    prepared_from(corpus, expected, on_error="skip")
    with pytest.raises(ValueError, match="line 34"):
        prepared_from(corpus, output)
    assert (
        {"train-00000.bin", "train-00001.bin", "train-00002.bin"}
        <= contents(output).keys()
        < contents(expected).keys() | {"progress.jsonl"}
    )
    assert not [name for name in contents(output) if "partial" in name]
    with pytest.raises(ValueError, match="not finished: start the same `crosscurrent prepare` again"):
        PreparedText(output)
    shard = output / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-3])
    untouched = (output / "train-00000.bin").stat().st_mtime_ns
    prepared_from(corpus, output, on_error="skip")
    assert contents(output) == contents(expected)
    assert (output / "train-00000.bin").stat().st_mtime_ns == untouched


def test_another_task_in_the_same_folder_is_refused(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    prepared_from(corpus, output)
    before = contents(output)
    with pytest.raises(ValueError, match=r"settings\.shard_tokens: 60 -> 61"):
        prepared_from(corpus, output, shard_tokens=61)
    with pytest.raises(ValueError, match=r"settings\.validation_share: 0\.3 -> 0\.0"):
        prepared_from(corpus, output, validation_share=0.0)
    other = ending_tokenizer()
    other.add_tokens(["qu"])
    with pytest.raises(ValueError, match=r"tokenizer\.vocab_size: 102 -> 103; tokenizer\.fingerprint"):
        prepare(LocalFiles([corpus]), other, output, tokenizer_name="characters", validation_share=0.3, shard_tokens=60)
    corpus.write_text(corpus.read_text().replace("a", "b"))
    with pytest.raises(ValueError, match=r"source\.files\.1 corpus\.jsonl\.sha256"):
        prepared_from(corpus, output)
    assert contents(output) == before


def test_folders_that_cannot_be_written_to(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds something else"):
        prepared_from(corpus, tmp_path / "notes")
    with pytest.raises(ValueError, match="is a file"):
        prepared_from(corpus, corpus)
    (tmp_path / "busy").mkdir()
    with FileLock(tmp_path / "busy" / ".lock"), pytest.raises(OSError, match="another process is at work"):
        prepared_from(corpus, tmp_path / "busy")


def test_nothing_left(tmp_path: Path) -> None:
    empty = write_jsonl(tmp_path / "empty.jsonl", ["", " "])
    with pytest.raises(ValueError, match=r"no document is left for training.*empty: 2 \(first: empty\.jsonl, line 1"):
        prepared_from(empty, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    one = write_jsonl(tmp_path / "one.jsonl", ["held out or not"])
    with pytest.warns(UserWarning, match="no document was held out for validation: 1 documents are too few"):
        prepared_from(one, tmp_path / "few", validation_share=1e-9)
    with pytest.raises(ValueError, match="1 held out for validation"):
        prepared_from(one, tmp_path / "none", validation_share=1 - 1e-9)


def test_settings_and_tokenizers_that_cannot_be(corpus: Path, tmp_path: Path) -> None:
    for settings in ({"validation_share": 1.0}, {"shard_tokens": 0}, {"num_workers": 0}, {"on_error": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            prepared_from(corpus, tmp_path / "out", **settings)  # type: ignore[arg-type]
    endless = ending_tokenizer()
    endless.eos_token = None
    with pytest.raises(ValueError, match="'characters' has no EOS token"):
        prepare(LocalFiles([corpus]), endless, tmp_path / "out", tokenizer_name="characters")
    assert not (tmp_path / "out").exists()


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_answers_mistakes(corpus: Path, tmp_path: Path) -> None:
    assert "Example: crosscurrent prepare" in run("prepare", "--help").stdout
    saved = tmp_path / "tokenizer"
    ending_tokenizer().save_pretrained(saved)
    rest = ("--tokenizer", saved, "--output", tmp_path / "out")
    assert run("prepare", corpus).exit_code == 2
    assert run("prepare", corpus, *rest, "--validation-share", "1").exit_code == 2
    assert run("prepare", corpus, *rest, "--on-error", "ignore").exit_code == 2
    other = tmp_path / "data.csv"
    other.write_text("a")
    for arguments, words in [
        ((tmp_path / "missing.jsonl", *rest), "missing.jsonl: no such file"),
        ((other, *rest), "data.csv is of no kind"),
        ((corpus, *rest, "--field", "txt"), "Did you mean 'text'?"),
        ((corpus, *rest, "--hub-split", "train"), "--hub-split has no effect on files"),
        ((corpus, corpus, *rest), "given twice"),
        (("owner/no-such-data", *rest), "owner/no-such-data, taken for a data set of the Hugging Face hub"),
        ((corpus, "--tokenizer", tmp_path, "--output", tmp_path / "out"), "no tokenizer in"),
    ]:
        result = run("prepare", *arguments)
        assert result.exit_code == 1 and result.stdout == "", result.output
        assert words in result.stderr.splitlines()[-1]
        assert not (tmp_path / "out").exists()
    result = run("prepare", corpus, *rest)
    assert result.exit_code == 0 and "left out, empty: 2 (first: corpus.jsonl, line 10; " in result.stdout
    assert run("prepare", corpus, *rest).stdout == result.stdout  # there already
