"""Texts as token ids in memory-mapped files, as `crosscurrent prepare` writes them.

A folder holds shards, the tokenizer, and `manifest.json`, which is written last. A shard holds whole documents: the token
ids of all, one after another (uint16 or uint32), then how many tokens each has (int64); little-endian.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from crosscurrent.data.tokenization import tokenizer_identity
from crosscurrent.suggestions import did_you_mean

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"  # a folder with the one that made the tokens
PROGRESS = "progress.jsonl"  # of a folder that is not finished
SPLITS = ("train", "validation")
_LENGTH = np.dtype("<i8")
_AGAIN = "prepare the texts again, into another folder"


@dataclass(frozen=True)
class Shard:
    """A file of tokens, as the manifest lists it.

    Attributes:
        file: its name in the folder.
        num_tokens: in it.
        num_documents: in it.
        sha256: of its bytes, in hexadecimal.
    """

    file: str
    num_tokens: int
    num_documents: int
    sha256: str

    def num_bytes(self, dtype: np.dtype[Any]) -> int:
        """Its size, if it is whole."""
        return self.num_tokens * dtype.itemsize + self.num_documents * _LENGTH.itemsize


def shard_name(split: str, number: int) -> str:
    """The name of a shard.

    Example:
        >>> shard_name("train", 7)
        'train-00007.bin'
    """
    return f"{split}-{number:05d}.bin"


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """What token ids are stored as: uint16 if the vocabulary fits, else uint32.

    Example:
        >>> token_dtype(65536), token_dtype(65537)
        (dtype('uint16'), dtype('uint32'))
    """
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def check_split(split: str) -> None:
    """Raise ValueError if there is no split of this name."""
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}: give one of {list(SPLITS)}.{did_you_mean(split, SPLITS)}")


def lengths_as_bytes(lengths: Sequence[int]) -> bytes:
    """How many tokens the documents of a shard have, as its end holds it."""
    return np.asarray(lengths, _LENGTH).tobytes()


def sha256_of(path: Path) -> str:
    """Of the bytes of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class PreparedText:
    """A folder that `crosscurrent prepare` made, for reading.

    Opening it checks the manifest and the size of every file. What is read of the files is mapped into memory, not loaded;
    sent to another process, the object is as large as the manifest.

    Args:
        folder: the `--output` of `crosscurrent prepare`.

    Attributes:
        folder: as given.
        manifest: what `manifest.json` holds.
        shards: for "train" and "validation", the shards in order.
        dtype: of the stored token ids.

    Raises:
        ValueError: the folder is not finished or not of this format; a shard is missing, cut short or too long; a shard is
            there that the manifest does not know.
        OSError: a file cannot be read.

    Example::

        prepared = PreparedText("fineweb-edu-10b")
        prepared.check_tokenizer(tokenizer)
        prepared.num_tokens("train")
    """

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        self.manifest = _read_manifest(self.folder)
        self.shards: dict[str, tuple[Shard, ...]] = _read_shards(self.manifest, self.folder / MANIFEST)
        self.dtype = token_dtype(self.vocab_size)
        self._maps: dict[str, np.ndarray] = {}
        self._starts: dict[str, np.ndarray] = {}
        for shard in self._all_shards():
            self._check_size(shard)
        known = {shard.file for shard in self._all_shards()}
        foreign = sorted(path.name for path in self.folder.glob("*.bin") if path.name not in known)
        if foreign:
            raise ValueError(f"{self.folder} holds {foreign[0]}, which its manifest does not list: move it elsewhere.")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}, "_starts": {}}  # another process maps the files itself

    @property
    def vocab_size(self) -> int:
        """How many ids the tokenizer has; every token is below."""
        return self.manifest["tokenizer"]["vocab_size"]

    @property
    def eos_token_id(self) -> int:
        """The last token of every document."""
        return self.manifest["tokenizer"]["eos_token_id"]

    @property
    def fingerprint(self) -> str:
        """The sha256 of the manifest, which lists the checksums of all files: another text has another one."""
        return sha256_of(self.folder / MANIFEST)

    def num_tokens(self, split: str) -> int:
        """Tokens of a split, "train" or "validation", the EOS of each document included."""
        return sum(shard.num_tokens for shard in self._shards_of(split))

    def num_documents(self, split: str) -> int:
        """Documents of a split."""
        return sum(shard.num_documents for shard in self._shards_of(split))

    def lengths(self, split: str) -> np.ndarray:
        """[documents] int64, how many tokens each has.

        Raises:
            ValueError: they do not add up to the tokens of their shard.
        """
        parts = [self._lengths_of(shard) for shard in self._shards_of(split)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def read(self, split: str, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64, the tokens from number `start` to before number `stop` of the split, shard after shard."""
        shards = self._shards_of(split)
        if split not in self._starts:
            self._starts[split] = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        starts = self._starts[split]
        if not 0 <= start <= stop <= starts[-1]:
            raise ValueError(f"tokens {start} to {stop} are not all in split {split!r}, which has {starts[-1]}.")
        parts = []
        number = int(np.searchsorted(starts, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(starts[number + 1]))
            parts.append(self._map(shards[number])[start - starts[number] : end - starts[number]])
            start, number = end, number + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)

    def verify(self) -> None:
        """Read every shard and compare its checksum with the manifest's.

        Raises:
            ValueError: one has changed.
        """
        for shard in tqdm(self._all_shards(), desc="checksums", unit="shard", leave=False, delay=2):
            if sha256_of(self.folder / shard.file) != shard.sha256:
                raise ValueError(f"{self.folder / shard.file} is damaged (another checksum): restore it, or {_AGAIN}.")

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The one that made the tokens.

        Raises:
            ValueError: it is another one by now, or gone.
        """
        path = self.folder / TOKENIZER
        if not path.is_dir():
            raise ValueError(f"{path} is missing: restore it, or {_AGAIN}.")
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
        self.check_tokenizer(tokenizer)
        return tokenizer

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError if another tokenizer made the tokens."""
        then = self.manifest["tokenizer"]
        now = tokenizer_identity(tokenizer, then["name"])
        changed = [f"{key} {then[key]} -> {now[key]}" for key in now if then[key] != now[key]]
        if changed:
            raise ValueError(
                f"{self.folder} was prepared with another tokenizer than this one, {tokenizer.name_or_path!r}: it was "
                f"{then['name']!r} ({'; '.join(changed)}). Use that one, or {_AGAIN} with this one. (Versions of "
                "transformers can also make different tokenizers of one file.)"
            )

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raise ValueError if a model with so many embeddings cannot take every token."""
        if vocab_size < self.vocab_size:
            raise ValueError(
                f"a model with vocab_size={vocab_size} cannot read {self.folder}, whose tokenizer "
                f"{self.manifest['tokenizer']['name']!r} has {self.vocab_size} ids: set the model's vocab_size to at least "
                f"{self.vocab_size}, or {_AGAIN} with the model's own tokenizer."
            )

    def _all_shards(self) -> list[Shard]:
        return [shard for split in SPLITS for shard in self.shards[split]]

    def _shards_of(self, split: str) -> tuple[Shard, ...]:
        check_split(split)
        return self.shards[split]

    def _check_size(self, shard: Shard) -> None:
        path, size = self.folder / shard.file, shard.num_bytes(self.dtype)
        if not path.is_file():
            raise ValueError(f"{path} is missing, which the manifest lists: restore it, or {_AGAIN}.")
        if path.stat().st_size != size:
            raise ValueError(
                f"{path} has {path.stat().st_size} bytes, by the manifest it has {size}: it was cut short or is of another "
                f"folder. Restore it, or {_AGAIN}."
            )

    def _map(self, shard: Shard) -> np.ndarray:
        if shard.file not in self._maps:
            path = self.folder / shard.file
            self._maps[shard.file] = np.memmap(path, self.dtype, mode="r", shape=(shard.num_tokens,))
        return self._maps[shard.file]

    def _lengths_of(self, shard: Shard) -> np.ndarray:
        path, offset = self.folder / shard.file, shard.num_tokens * self.dtype.itemsize
        lengths = np.fromfile(path, _LENGTH, count=shard.num_documents, offset=offset).astype(np.int64)
        if lengths.min(initial=1) < 1 or lengths.sum() != shard.num_tokens:
            raise ValueError(f"{path} is damaged (its documents do not fit its tokens): restore it, or {_AGAIN}.")
        return lengths


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.exists():
        if (folder / PROGRESS).exists():
            raise ValueError(f"{folder} is not finished: start the same `crosscurrent prepare` again, it goes on.")
        raise ValueError(
            f"{folder} is no folder of prepared text (it has no {MANIFEST}): make one, `crosscurrent prepare`."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or {_AGAIN}.") from error
    found = manifest.get("format_version") if isinstance(manifest, dict) else None
    if found != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version {found!r}, this version of crosscurrent reads {FORMAT_VERSION}: {_AGAIN}."
        )
    return manifest


def _read_shards(manifest: dict[str, Any], path: Path) -> dict[str, tuple[Shard, ...]]:
    try:
        tokenizer = manifest["tokenizer"]
        _refuse_unless(isinstance(tokenizer["name"], str) and isinstance(tokenizer["fingerprint"], str))
        _refuse_unless(0 <= tokenizer["eos_token_id"] < tokenizer["vocab_size"] <= 2**32)
        shards = {split: tuple(Shard(**entry) for entry in manifest["splits"][split]["shards"]) for split in SPLITS}
        for split, listed in shards.items():
            _refuse_unless(
                all(type(count) is int and count > 0 for s in listed for count in (s.num_tokens, s.num_documents))
            )
            for shard in listed:
                if not re.fullmatch(rf"{split}-\d+\.bin", shard.file):  # so nothing leads out of the folder
                    raise ValueError(f"{shard.file!r} is no name of a shard of {split}")
    except (KeyError, TypeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path} is damaged ({reason}): restore it, or {_AGAIN}.") from error
    return shards


def _refuse_unless(fits: bool) -> None:
    if not fits:
        raise ValueError("a value is outside its range")


def shard_entry(shard: Shard) -> dict[str, Any]:
    """A shard as the manifest lists it."""
    return asdict(shard)
