"""Turning texts into token ids once, into a folder that `shards.PreparedText` reads.

The source is read in order, in batches; other processes tokenise them; one process writes what comes back, in order. At the
end of the batch that fills a shard, the shards of both splits are closed and the place in the source is noted, from where
work goes on if it was stopped. So what is written follows from the source, the tokenizer and the settings alone, whatever
the number of processes, and however often it was stopped.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from crosscurrent.data.shards import (
    FORMAT_VERSION,
    MANIFEST,
    PROGRESS,
    SPLITS,
    TOKENIZER,
    PreparedText,
    Shard,
    lengths_as_bytes,
    sha256_of,
    shard_entry,
    shard_name,
    token_dtype,
)
from crosscurrent.data.sources import Batch, LeftOut, OnError, Position, Source, read_batches
from crosscurrent.data.tokenization import check_share, document_ids, is_held_out, tokenizer_identity, train_tokenizer
from crosscurrent.files import LOCK, locked, refuse_file, write_whole
from crosscurrent.suggestions import differences

SHARD_TOKENS = 100_000_000
VALIDATION_SHARE = 0.005
_PARTIAL = ".partial"  # ends the name of a shard that is being written


def prepare(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    tokenizer_name: str,
    validation_share: float = VALIDATION_SHARE,
    shard_tokens: int = SHARD_TOKENS,
    num_workers: int = 1,
    on_error: OnError = "stop",
) -> PreparedText:
    """Tokenise all documents of a source into a folder of shards, or go on where that was stopped.

    Every document gets the tokenizer's EOS at its end and nothing else. Which are held out for validation follows from the
    hash of their text. The result is the same, byte for byte, for any number of workers, stopped or not. A finished folder
    is left as it is.

    Args:
        source: of the documents.
        tokenizer: one with an EOS token.
        output: the folder. It need not exist.
        tokenizer_name: what to call the tokenizer in the manifest, such as its id on the hub.
        validation_share: of the documents, from 0 to below 1.
        shard_tokens: a shard is closed when both splits together have so many.
        num_workers: processes that tokenise. 1: this one, whose tokenizer may itself use all cores. More are started anew
            ("spawn"), so a script that calls this needs `if __name__ == "__main__":`.
        on_error: "stop" at what cannot be read as a text, or "skip" and count it. Empty documents are always left out and
            counted.

    Raises:
        ValueError: a setting is out of range; a text cannot be read; the folder holds something else, or was begun with
            another source, tokenizer or settings; nothing is left for training. If no shard was finished nothing is left
            behind.
        OSError: a file cannot be read or written, or another process is at work in the folder.

    Example::

        prepare(HubDataset("HuggingFaceFW/fineweb-edu", "sample-10BT"), tokenizer, Path("fineweb-edu-10b"),
                tokenizer_name="HuggingFaceTB/SmolLM2-135M", num_workers=16)
    """
    check_share(validation_share)
    if shard_tokens < 1 or num_workers < 1:
        raise ValueError(f"shard_tokens={shard_tokens}, num_workers={num_workers}: both must be at least 1.")
    task: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "tokenizer": tokenizer_identity(tokenizer, tokenizer_name),
        "source": source.describe(),
        "settings": {"validation_share": validation_share, "shard_tokens": shard_tokens},
    }
    with _claimed(output):
        if (output / MANIFEST).exists():
            prepared = PreparedText(output)
            _refuse_another_task(output, prepared.manifest, task)
            (output / PROGRESS).unlink(missing_ok=True)
            return prepared
        folder = _Folder(output, task)
        try:
            batches = read_batches(source, on_error, folder.position)
            work = _Tokenise(tokenizer, validation_share, token_dtype(task["tokenizer"]["vocab_size"]))
            with closing(_in_processes(work, batches, num_workers)) as done, _Bar(folder) as bar:
                for batch, tokens in done:
                    folder.add(batch, tokens)
                    bar.update(tokens)
                    if folder.num_open_tokens >= shard_tokens:
                        folder.close_shards()
            folder.finish(tokenizer)
        finally:
            folder.tidy()
    return PreparedText(output)


def new_tokenizer(
    source: Source, vocab_size: int, validation_share: float = VALIDATION_SHARE, on_error: OnError = "stop"
) -> PreTrainedTokenizerBase:
    """A tokenizer made of the documents of a source that are for training (`tokenization.train_tokenizer`)."""
    texts = (text for batch in read_batches(source, on_error) for text in batch.texts)
    return train_tokenizer((text for text in texts if not is_held_out(text, validation_share)), vocab_size)


def _refuse_another_task(output: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    changed = differences({key: then.get(key) for key in now}, now)
    if changed:
        more = f"; and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ValueError(
            f"{output} was begun with something else ({'; '.join(changed[:3])}{more}): start it with the same source, "
            "tokenizer and settings, or give another folder, or delete this one."
        )


@contextmanager
def _claimed(output: Path) -> Iterator[None]:
    """Keep other processes out of the folder, which is made if need be and removed again if it stays empty."""
    refuse_file(output)
    ours = {LOCK, MANIFEST, PROGRESS}
    if output.exists() and not ours & {entry.name for entry in output.iterdir()} and any(output.iterdir()):
        raise ValueError(f"{output} holds something else than prepared text: give another folder.")
    output.mkdir(parents=True, exist_ok=True)
    with locked(output, OSError(f"{output}: another process is at work there. Wait for it, or stop it.")):
        try:
            yield
        finally:
            if all(entry.name == LOCK for entry in output.iterdir()):
                shutil.rmtree(output)


@dataclass(frozen=True)
class _Tokens:
    """Of the documents of a batch: ids, one document after another; lengths and held_out, one per document."""

    ids: np.ndarray
    lengths: np.ndarray
    held_out: np.ndarray


@dataclass(frozen=True)
class _Tokenise:
    """What is done to a batch, in this process or in another."""

    tokenizer: PreTrainedTokenizerBase
    validation_share: float
    dtype: np.dtype[Any]

    def __call__(self, texts: list[str]) -> _Tokens:
        documents = document_ids(self.tokenizer, texts)
        return _Tokens(
            np.concatenate([np.asarray(ids, self.dtype) for ids in documents] or [np.zeros(0, self.dtype)]),
            np.asarray([len(ids) for ids in documents], np.int64),
            np.asarray([is_held_out(text, self.validation_share) for text in texts], bool),
        )


_work_of_this_process: _Tokenise | None = None


def _start_worker(work: _Tokenise) -> None:
    global _work_of_this_process  # noqa: PLW0603 - the tokenizer is sent once, not with every batch
    _work_of_this_process = work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for more work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _in_worker(texts: list[str]) -> _Tokens:
    assert _work_of_this_process is not None
    return _work_of_this_process(texts)


def _in_processes(work: _Tokenise, batches: Iterator[Batch], num_workers: int) -> Generator[tuple[Batch, _Tokens]]:
    """Each batch with what the work makes of it, in order."""
    if num_workers == 1:
        yield from ((batch, work(batch.texts)) for batch in batches)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, _start_worker, (work,))
    waiting: deque[tuple[Batch, Future[_Tokens]]] = deque()
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(_in_worker, batch.texts)))
            if len(waiting) > 2 * num_workers:  # so that reading does not run far ahead
                first, future = waiting.popleft()
                yield first, future.result()
        for first, future in waiting:
            yield first, future.result()
    except BrokenProcessPool as error:
        raise OSError(
            "a process that tokenises was ended from outside (is there memory enough?). Start the same command again, with "
            "fewer workers if need be: it goes on from the last finished shard."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _OpenShard:
    """A shard that is being written, under another name until it is whole."""

    def __init__(self, path: Path):
        self.path = path
        self.num_tokens = 0
        self._lengths: list[int] = []
        self._partial = path.with_name(path.name + _PARTIAL)
        self._file = self._partial.open("wb")
        self._hash = hashlib.sha256()

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        self.num_tokens += len(ids)
        self._lengths += lengths.tolist()
        self._write(ids.tobytes())

    def _write(self, content: bytes) -> None:
        self._file.write(content)
        self._hash.update(content)

    def finish(self) -> Shard:
        self._write(lengths_as_bytes(self._lengths))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self.path)
        return Shard(self.path.name, self.num_tokens, len(self._lengths), self._hash.hexdigest())

    def abandon(self) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)


class _Folder:
    """The folder that is being filled, and what of it is finished.

    The progress file holds a line that says what is being done, and one for each time shards were closed.
    """

    def __init__(self, path: Path, task: dict[str, Any]):
        self.path = path
        self.task = task
        self.closed: list[dict[str, Any]] = []
        self._dtype = token_dtype(task["tokenizer"]["vocab_size"])
        self._open: dict[str, _OpenShard] = {}
        self._left_out = LeftOut()
        self._end: Position | None = None
        self._go_on()

    @property
    def position(self) -> Position:
        """In the source, where the finished shards end."""
        return tuple(self.closed[-1]["end"]) if self.closed else (0, 0)

    @property
    def num_open_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self._open.values())

    def shards(self, split: str) -> list[dict[str, Any]]:
        """The finished shards of a split."""
        return [entry["shards"][split] for entry in self.closed if split in entry["shards"]]

    def add(self, batch: Batch, tokens: _Tokens) -> None:
        for split, belongs in (("train", ~tokens.held_out), ("validation", tokens.held_out)):
            if belongs.any():
                if split not in self._open:
                    self._open[split] = _OpenShard(self.path / shard_name(split, len(self.shards(split))))
                self._open[split].add(tokens.ids[np.repeat(belongs, tokens.lengths)], tokens.lengths[belongs])
        self._left_out.merge(batch.left_out.kinds)
        self._end = batch.end

    def close_shards(self) -> None:
        """Finish the open shards and note the place in the source."""
        shards = {split: shard_entry(shard.finish()) for split, shard in self._open.items()}
        self.closed.append({"end": self._end, "shards": shards, "left_out": self._left_out.kinds})
        self._open, self._left_out, self._end = {}, LeftOut(), None
        self._write_progress()

    def finish(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Save the tokenizer and write the manifest, after which the folder is finished.

        Raises:
            ValueError: nothing is left for training.
        """
        if self._end is not None:
            self.close_shards()
        left_out = LeftOut()
        for entry in self.closed:
            left_out.merge(entry["left_out"])
        splits = {split: _totals(self.shards(split)) for split in SPLITS}
        if not splits["train"]["num_documents"]:
            held_out = splits["validation"]["num_documents"]
            self._delete_from(0)
            raise ValueError(
                f"no document is left for training: {held_out} held out for validation; left out: "
                f"{'; '.join(left_out.lines()) or 'none'}."
            )
        if self.task["settings"]["validation_share"] and not splits["validation"]["num_documents"]:
            warnings.warn(
                f"no document was held out for validation: {splits['train']['num_documents']} documents are too few for "
                f"validation_share={self.task['settings']['validation_share']}.",
                stacklevel=3,
            )
        manifest = self.task | {"splits": splits, "left_out": dict(sorted(left_out.kinds.items()))}
        shutil.rmtree(self.path / TOKENIZER, ignore_errors=True)  # of a process that was killed here
        tokenizer.save_pretrained(self.path / TOKENIZER)
        write_whole(self.path / MANIFEST, json.dumps(manifest, indent=1) + "\n")
        (self.path / PROGRESS).unlink()

    def tidy(self) -> None:
        """Leave nothing half-written behind; if nothing is finished, nothing at all."""
        for shard in self._open.values():
            shard.abandon()
        if not self.closed:
            (self.path / PROGRESS).unlink(missing_ok=True)

    def _go_on(self) -> None:
        """Find what is finished, and delete the rest."""
        path = self.path / PROGRESS
        if path.exists():
            then, entries = _read_progress(path)
            _refuse_another_task(self.path, then, self.task)
            self.closed = entries
        for path in self.path.glob(".*.partial-*"):  # of a process that was killed
            path.unlink()
        with tqdm(self.closed, desc="checking finished shards", leave=False, delay=2) as bar:
            damaged = next((number for number, entry in enumerate(bar) if not self._is_whole(entry)), None)
        self._delete_from(len(self.closed) if damaged is None else damaged)
        self._write_progress()

    def _is_whole(self, entry: dict[str, Any]) -> bool:
        files = [(self.path / shard["file"], Shard(**shard)) for shard in entry["shards"].values()]
        return all(
            file.is_file() and file.stat().st_size == shard.num_bytes(self._dtype) and sha256_of(file) == shard.sha256
            for file, shard in files
        )

    def _delete_from(self, number: int) -> None:
        """Forget what was closed from a number on, and delete all shards, whole or not, that are not closed."""
        self.closed = self.closed[:number]
        kept = {shard["file"] for split in SPLITS for shard in self.shards(split)}
        for split in SPLITS:
            for path in (*self.path.glob(f"{split}-*.bin"), *self.path.glob(f"{split}-*.bin{_PARTIAL}")):
                if path.name not in kept:
                    path.unlink()

    def _write_progress(self) -> None:
        write_whole(self.path / PROGRESS, "".join(json.dumps(line) + "\n" for line in (self.task, *self.closed)))


def _totals(shards: list[dict[str, Any]]) -> dict[str, Any]:
    counts = {name: sum(shard[name] for shard in shards) for name in ("num_tokens", "num_documents")}
    return counts | {"shards": shards}


def _read_progress(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        task, *entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        is_one = isinstance(task, dict) and all({"end", "shards", "left_out"} == entry.keys() for entry in entries)
    except (ValueError, AttributeError):
        is_one = False
    if not is_one:
        raise ValueError(f"{path} is damaged: delete the folder, and start again.")
    return task, entries


class _Bar:
    """Documents and tokens so far, those of finished shards included."""

    def __init__(self, folder: _Folder):
        totals = [_totals(folder.shards(split)) for split in SPLITS]
        self._before = self._num_tokens = sum(total["num_tokens"] for total in totals)
        documents = sum(total["num_documents"] for total in totals)
        self._bar = tqdm(desc="preparing", unit=" documents", initial=documents)

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, tokens: _Tokens) -> None:
        self._num_tokens += len(tokens.ids)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        speed = tqdm.format_sizeof((self._num_tokens - self._before) / elapsed)
        self._bar.set_postfix_str(f"{tqdm.format_sizeof(self._num_tokens)} tokens, {speed} tokens/s", refresh=False)
        self._bar.update(len(tokens.lengths))
