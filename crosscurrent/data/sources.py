"""Where documents come from: files and folders, or a data set of the Hugging Face hub, in an order that never changes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from tqdm import tqdm

from crosscurrent.data.shards import sha256_of
from crosscurrent.data.texts import (
    SUFFIXES,
    Document,
    TextError,
    check_suffix,
    document_of,
    read_file,
    refuse_missing_field,
    require_package,
    suffix_of,
    text_of_row,
)

OnError = Literal["stop", "skip"]
Position = tuple[
    int, int
]  # a part of a source, and how many of its documents come before, wrong and empty ones counted

# A batch ends at whichever comes first. It decides where shards end, so these belong to the format of a prepared folder.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 2**18
_PLACES_NAMED = 5


class Source(Protocol):
    """Documents in an order, in parts that can be opened on their own."""

    @property
    def num_parts(self) -> int:
        """Files, mostly."""
        ...

    def read(self, part: int, first: int = 0) -> Iterator[Document | TextError]:
        """The documents of a part from number `first` on, and in place of one that is none what is wrong with it."""
        ...

    def describe(self) -> dict[str, Any]:
        """What makes this source this one, for JSON: two that read the same documents in the same order say the same."""
        ...


class LocalFiles:
    """Files of texts, and all such files in folders, sorted by name.

    Args:
        paths: .txt, .jsonl, .jsonl.gz and .parquet files, and folders of them, searched to the bottom.
        field: the key or column of the text.

    Attributes:
        files: their paths, in order.
        others: files of the folders that are of another kind, and are left out. Hidden ones are not named.

    Raises:
        ValueError: a file is of another kind, a folder holds none, or a file is given twice.
        OSError: there is no such file.

    Example::

        source = LocalFiles([Path("wikipedia.jsonl"), Path("books")])
    """

    def __init__(self, paths: Sequence[Path], field: str = "text"):
        self.field = field
        self.files: list[Path] = []
        self.others: list[Path] = []
        self._names: list[str] = []
        for path in paths:
            found = self._search(path)
            self.files += found
            self._names += [
                path.name if file == path else str(Path(path.name, file.relative_to(path))) for file in found
            ]
        places = Counter(file.resolve() for file in self.files)
        twice = [place for place, count in places.items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]} is given twice: its documents would be counted twice.")

    def _search(self, path: Path) -> list[Path]:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or folder")
        if path.is_file():
            check_suffix(path)
            return [path]
        inside = [file for file in sorted(path.rglob("*")) if file.is_file() and not _is_hidden(file.relative_to(path))]
        found = [file for file in inside if suffix_of(file)]
        self.others += [file for file in inside if not suffix_of(file)]
        if not found:
            raise ValueError(f"{path} holds no file of texts: allowed are {', '.join(SUFFIXES)}.")
        return found

    @property
    def num_parts(self) -> int:
        """Files."""
        return len(self.files)

    def read(self, part: int, first: int = 0) -> Iterator[Document | TextError]:
        """As `Source.read`."""
        return read_file(self.files[part], self.field, self._names[part], first)

    def describe(self) -> dict[str, Any]:
        """The names, sizes and checksums of the files, without the folders that they lie in."""
        return {"kind": "files", "field": self.field, "files": self._contents}

    @cached_property
    def _contents(self) -> dict[str, Any]:
        pairs = list(zip(self._names, self.files, strict=True))
        with tqdm(pairs, desc="checksums", unit="file", leave=False, delay=2) as bar:
            return {
                f"{number} {name}": {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
                for number, (name, file) in enumerate(bar, start=1)
            }


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


class HubDataset:
    """A split of a data set of the Hugging Face hub, streamed with the package `datasets`.

    Args:
        name: such as "HuggingFaceFW/fineweb-edu".
        config: of the data set, such as "sample-10BT". None: its default.
        split: of the data set.
        field: the column of the text.
        revision: a branch, tag or commit. It is resolved to the commit at once, so that a restart reads the same texts.

    Raises:
        ValueError: the package is missing, or the data set has no such config, split or column.
        OSError: the hub cannot be reached, or has no such data set.

    Example::

        source = HubDataset("HuggingFaceFW/fineweb-edu", "sample-10BT")
    """

    def __init__(
        self,
        name: str,
        config: str | None = None,
        split: str = "train",
        field: str = "text",
        revision: str | None = None,
    ):
        require_package(
            "datasets", f"{name} is no file or folder here, so it was taken for a data set of the hub: to read it"
        )
        from datasets import load_dataset_builder

        self.name, self.config, self.split, self.field = name, config, split, field
        with _hub_errors(name):
            builder = load_dataset_builder(name, config, revision=revision)
            self.revision = builder.hash  # the commit
            data: Any = builder.as_streaming_dataset(split=split)
        if data.column_names is not None:
            refuse_missing_field(field, data.column_names, name)
            data = data.select_columns([field])
        self._data = data

    @property
    def num_parts(self) -> int:
        """Files of the data set."""
        return self._data.num_shards

    def read(self, part: int, first: int = 0) -> Iterator[Document | TextError]:
        """As `Source.read`."""
        rows = self._data.shard(num_shards=self.num_parts, index=part)
        with _hub_errors(self.name):
            for number, row in enumerate(islice(rows, first, None), start=first + 1):
                yield document_of(text_of_row, row, self.field, f"{self.name}, part {part + 1}, row {number}")

    def describe(self) -> dict[str, Any]:
        """Everything that it was made with, and the commit."""
        named = {"name": self.name, "config": self.config, "split": self.split, "revision": self.revision}
        return {"kind": "hub", "field": self.field} | named


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Make an OSError that says what was read of what goes wrong with the network."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (ConnectionError, FileNotFoundError, HTTPError) as error:
        raise OSError(f"{name}, taken for a data set of the Hugging Face hub, cannot be read: {error}") from error


def open_source(
    names: Sequence[str],
    field: str = "text",
    hub_config: str | None = None,
    hub_split: str | None = None,
    hub_revision: str | None = None,
) -> LocalFiles | HubDataset:
    """The files and folders of these names, or the one data set of the hub.

    Args:
        names: what exists here is a file or folder; a single other name of the form owner/name is a data set of the hub.
        field: the key or column of the text.
        hub_config, hub_split, hub_revision: see `HubDataset`; for files they have no effect, and are refused.

    Raises:
        ValueError, OSError: as `LocalFiles` and `HubDataset`; files and a data set are mixed, or more than one is given.
    """
    paths = [Path(name) for name in names]
    missing = [path for path in paths if not path.exists()]
    looks_local = any(suffix_of(path) or path.is_absolute() or len(path.parts) != 2 for path in missing)
    if not missing or looks_local:
        given = [
            name for name, value in (("config", hub_config), ("split", hub_split), ("revision", hub_revision)) if value
        ]
        source = LocalFiles(paths, field)
        if given:
            raise ValueError(f"--hub-{given[0]} has no effect on files: leave it out.")
        return source
    if len(paths) > 1:
        raise ValueError(f"{missing[0]} is no file or folder here; a data set of the hub is given alone.")
    return HubDataset(names[0], hub_config, hub_split or "train", field, hub_revision)


class LeftOut:
    """What was no document, by kind: how many, and the first places.

    Example:
        >>> left_out = LeftOut()
        >>> left_out.add("empty", "a.jsonl, line 3")
        >>> left_out.kinds
        {'empty': {'count': 1, 'first': ['a.jsonl, line 3']}}
    """

    def __init__(self, kinds: dict[str, Any] | None = None):
        self.kinds: dict[str, Any] = {}
        self.merge(kinds or {})

    def add(self, kind: str, where: str) -> None:
        """Count one more."""
        self.merge({kind: {"count": 1, "first": [where]}})

    def merge(self, kinds: dict[str, Any]) -> None:
        """Add what came after."""
        for kind, more in kinds.items():
            mine = self.kinds.get(kind, {"count": 0, "first": []})
            first = [*mine["first"], *more["first"]][:_PLACES_NAMED]
            self.kinds[kind] = {"count": mine["count"] + more["count"], "first": first}

    def lines(self) -> list[str]:
        """One for each kind, for people."""
        return [
            f"{kind}: {found['count']:,} (first: {'; '.join(found['first'])})"
            for kind, found in sorted(self.kinds.items())
        ]


@dataclass
class Batch:
    """Some documents of a source, one after another.

    Attributes:
        texts: of the documents.
        left_out: what was none.
        end: where the next batch begins.
    """

    texts: list[str] = field(default_factory=list)
    left_out: LeftOut = field(default_factory=LeftOut)
    end: Position = (0, 0)


def read_batches(source: Source, on_error: OnError, start: Position = (0, 0)) -> Iterator[Batch]:
    """All documents of a source from a position on, in batches that depend on that position alone.

    Documents of white space only are left out and counted.

    Args:
        source: of the documents.
        on_error: "stop": what cannot be read as a text raises; "skip": it is left out and counted.
        start: the end of another batch.

    Raises:
        ValueError: see on_error; or `on_error` is neither.
        OSError: the source cannot be read.
    """
    if on_error not in get_args(OnError):
        raise ValueError(f"on_error={on_error!r} is not allowed: give one of {list(get_args(OnError))}.")
    batch, num_characters, num_read = Batch(), 0, 0
    first_part, first = start
    for part in range(first_part, source.num_parts):
        for number, found in enumerate(source.read(part, first), start=first + 1):
            batch.end, num_read = (part, number), num_read + 1
            if isinstance(found, TextError):
                if on_error == "stop":
                    raise ValueError(
                        f"{found} Mend it, or leave all such out, counted, with on_error='skip' (--on-error skip)."
                    ) from found
                batch.left_out.add(found.kind, found.where)
            elif not found.text.strip():
                batch.left_out.add("empty", found.where)
            else:
                batch.texts.append(found.text)
                num_characters += len(found.text)
            if num_read >= _BATCH_DOCUMENTS or num_characters >= _BATCH_CHARACTERS:
                yield batch
                batch, num_characters, num_read = Batch(), 0, 0
        first = 0
    if num_read:
        yield batch
