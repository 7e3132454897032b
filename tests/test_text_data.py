"""Texts for pretraining: where they are read from, how prepared ones are checked, and the rows that they are packed into."""

import gzip
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

import crosscurrent as cc
from crosscurrent.data.packing import PackedRows, Row
from crosscurrent.data.prepare import prepare
from crosscurrent.data.shards import PreparedText, token_dtype
from crosscurrent.data.sources import HubDataset, LocalFiles
from crosscurrent.data.streaming import StreamedRows
from crosscurrent.data.texts import Document
from crosscurrent.data.tokenization import tokenizer_identity
from tests.subjects import gradients, largest_difference, make_rlt, make_t2mlr
from tests.tiny_texts import documents_in, documents_of_epoch, ending_tokenizer, random_texts, write_jsonl

TOKENIZER = ending_tokenizer()
EOS = 0


def make_prepared(folder: Path, texts: list[str], validation_share: float = 0.3) -> PreparedText:
    path = write_jsonl(folder / "corpus.jsonl", texts)
    settings: dict[str, Any] = {"validation_share": validation_share, "shard_tokens": 100}
    return prepare(LocalFiles([path]), TOKENIZER, folder / "prepared", tokenizer_name="characters", **settings)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedText:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosscurrent.data.sources._BATCH_DOCUMENTS", 4)
        found = make_prepared(tmp_path_factory.mktemp("text"), random_texts(40))
    assert len(found.shards["train"]) > 2
    return found


# Rows


@pytest.mark.parametrize("length", [2, 3, 7, 16, 50, 10_000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_document_once(prepared: PreparedText, length: int, shuffle: bool) -> None:
    rows = PackedRows(prepared, "train", length, seed=3, shuffle=shuffle)
    assert len(rows) == rows.rows_per_epoch == -(-prepared.num_tokens("train") // length)
    found, stored = documents_of_epoch(rows, EOS), documents_in(prepared, "train")
    assert sorted(found) == sorted(stored)
    assert (found == stored) is not shuffle
    assert all(row["attention_mask"].all() for row in list(rows)[:-1])  # only the end of an epoch is padded


def test_orders_are_new_in_each_epoch_and_for_each_seed(prepared: PreparedText) -> None:
    rows = PackedRows(prepared, "train", 16, seed=3)
    orders = [documents_of_epoch(rows, EOS, epoch) for epoch in range(3)]
    orders.append(documents_of_epoch(PackedRows(prepared, "train", 16, seed=4), EOS))
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({json.dumps(order) for order in orders}) == len(orders)


def test_a_row_follows_from_seed_and_number(prepared: PreparedText) -> None:
    """Whatever was read before, in whichever process."""
    rows = PackedRows(prepared, "train", 16, seed=3)
    numbers = [*range(2 * len(rows) + 3)]
    expected = [rows[number] for number in numbers]
    assert len(pickle.dumps(rows)) < 20_000
    for number in reversed(numbers):
        fresh = pickle.loads(pickle.dumps(rows))
        assert_same_rows([fresh[number]], [expected[number]])
    sampler = numbers[5:]
    loader: Any = DataLoader(rows, batch_size=1, sampler=sampler, num_workers=2, collate_fn=lambda batch: batch[0])
    assert_same_rows(list(loader), expected[5:])


def assert_same_rows(found: list[Row], expected: list[Row]) -> None:
    assert len(found) == len(expected)
    for left, right in zip(found, expected, strict=True):
        assert left.keys() == right.keys()
        assert all(left[name].dtype == torch.int64 and torch.equal(left[name], right[name]) for name in left)


def test_cut_documents_are_counted(prepared: PreparedText) -> None:
    rows = PackedRows(prepared, "train", 16, seed=3)
    opened = sum(int(row["segment_ids"].max()) + 1 for row in rows)  # each document once for every row that it is in
    more_than_twice = sum(not (row["input_ids"] == EOS).any() for row in rows)  # its middle alone
    assert rows.num_documents_cut == opened - more_than_twice - prepared.num_documents("train")
    assert PackedRows(prepared, "train", 10_000).num_documents_cut == 0


def test_labels_leave_out_what_nothing_predicts(prepared: PreparedText) -> None:
    for row in PackedRows(prepared, "train", 16, seed=3):
        real = row["attention_mask"] == 1
        assert row["segment_ids"][0] == 0 and real[0]
        new = torch.diff(row["segment_ids"], prepend=torch.tensor([-1])) != 0
        assert torch.equal(row["labels"], torch.where(real & ~new, row["input_ids"], -100))
        ends = (row["input_ids"] == EOS) & real
        assert torch.equal(new[1:] & real[1:], ends[:-1] & real[1:])  # a segment is a document, or a part of one


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.parametrize("name", ["t2mlr", "rlt"])
def test_documents_in_a_row_compute_what_they_compute_alone(name: str, tmp_path: Path) -> None:
    """Loss and gradients, on a full row with a document cut at its end and on a padded one."""
    texts = ["0123", "45", "6789abcdefgh", "i", "jklmnopq"]
    rows = PackedRows(make_prepared(tmp_path, texts, validation_share=0), "train", 20, shuffle=False)
    model = make_t2mlr("llama") if name == "t2mlr" else make_rlt()
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    batch["input_ids"] %= model.config.vocab_size
    assert batch["attention_mask"].sum(1).tolist() == [20, 12]
    count = int((batch["labels"] != -100).sum())
    settings = {"num_items_in_batch": count, "use_cache": False, "solver": cc.Sequential()}
    together = model(**batch, **settings).loss
    alone = torch.zeros((), dtype=torch.float64)
    for ids, segments, mask in zip(batch["input_ids"], batch["segment_ids"], batch["attention_mask"], strict=True):
        for segment in range(int(segments.max()) + 1):
            document = ids[(segments == segment) & (mask == 1)][None]
            count -= document.shape[1] - 1
            if document.shape[1] > 1:
                alone = alone + model(document, labels=document, **settings).loss
    assert count == 0
    assert abs((together - alone).item()) < 1e-11
    assert largest_difference(gradients(model, together), gradients(model, alone)) < 1e-10


def test_a_document_longer_than_the_context(smollm2_tokenizer: Any, tmp_path: Path) -> None:
    path = Path(os.environ["CROSSCURRENT_TEST_DATA"]) / "tinyshakespeare.txt"
    prepared = prepare(
        LocalFiles([path]), smollm2_tokenizer, tmp_path / "out", tokenizer_name="smollm2-135m", validation_share=0
    )
    rows = PackedRows(prepared, "train", 1024, seed=1)
    (document,) = documents_of_epoch(rows, smollm2_tokenizer.eos_token_id)
    assert smollm2_tokenizer.decode(document[:-1]) == path.read_text()
    assert rows.num_documents_cut == 1
    assert all(row["segment_ids"].sum() == 0 for row in rows)
    with pytest.raises(ValueError, match=r"no tokens in split 'validation': prepare more .* larger --validation-share"):
        PackedRows(prepared, "validation", 1024)


def test_rows_that_cannot_be(prepared: PreparedText) -> None:
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"split": "valid"}, "Did you mean 'validation'?"),
        ({"sequence_length": 1}, "sequence_length=1"),
        ({"seed": -1}, "seed=-1"),
    ]
    for changes, words in mistakes:
        settings: Any = {"split": "train", "sequence_length": 8, **changes}
        with pytest.raises(ValueError, match=words.replace("?", r"\?")):
            PackedRows(prepared, **settings)
    rows = PackedRows(prepared, "validation", 8, shuffle=False)
    for number in (-1, len(rows)):
        with pytest.raises(IndexError, match="of one epoch"):
            rows[number]


# Without preparing


def test_streamed_rows_are_those_of_the_prepared_text(prepared: PreparedText) -> None:
    source = LocalFiles([prepared.folder.parent / "corpus.jsonl"])
    settings: dict[str, Any] = {"validation_share": 0.3}
    for split in ("train", "validation"):
        expected = list(PackedRows(prepared, split, 16, shuffle=False))
        for start in (0, 1, len(expected) - 1, len(expected)):
            streamed = StreamedRows(source, TOKENIZER, 16, split=split, start_row=start, **settings)
            assert_same_rows(list(streamed), expected[start:])
    loader: Any = DataLoader(streamed, batch_size=None, num_workers=2)
    with pytest.raises(ValueError, match="num_workers=2 of a DataLoader would each give every row"):
        list(loader)


def test_streams_that_cannot_be(tmp_path: Path) -> None:
    source = LocalFiles([write_jsonl(tmp_path / "empty.jsonl", ["", " "])])
    rows = StreamedRows(source, TOKENIZER, 8)
    with pytest.raises(ValueError, match=r"no document for split 'train'.*empty: 2"):
        next(iter(rows))
    broken = LocalFiles([write_jsonl(tmp_path / "broken.jsonl", ["fine", 7])])
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 2"):
        list(StreamedRows(broken, TOKENIZER, 8))
    rows = StreamedRows(broken, TOKENIZER, 8, on_error="skip")
    assert len(list(rows)) == 1 and rows.left_out.kinds["not a text"]["count"] == 1
    mistakes: list[dict[str, Any]] = [
        {"start_row": -1},
        {"split": "test"},
        {"validation_share": 2},
        {"sequence_length": 0},
    ]
    for changes in mistakes:
        settings: Any = {"sequence_length": 8, **changes}
        with pytest.raises(ValueError, match=str(next(iter(changes.values())))):
            StreamedRows(source, TOKENIZER, **settings)


# Prepared folders


@pytest.fixture
def folder(prepared: PreparedText, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(prepared.folder, copy)
    PreparedText(copy).verify()
    return copy


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def first_shard(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["splits"]["train"]["shards"][0]


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "half-written": (lambda f: os.truncate(f / "train-00001.bin", 9), "train-00001.bin has 9 bytes, by the manifest"),
    "too long": (lambda f: (f / "train-00001.bin").open("ab").write(b"x"), "train-00001.bin has .* bytes"),
    "missing": (lambda f: (f / "train-00001.bin").unlink(), "train-00001.bin is missing"),
    "foreign": (lambda f: (f / "train-00099.bin").touch(), "holds train-00099.bin, which its manifest does not list"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "is no folder of prepared text"),
    "cut manifest": (lambda f: os.truncate(f / "manifest.json", 99), "manifest.json is damaged"),
    "later format": (
        lambda f: change_manifest(f, lambda m: m.update(format_version=2)),
        "has format_version 2, .* reads 1",
    ),
    "no splits": (lambda f: change_manifest(f, lambda m: m.pop("splits")), "is damaged .no 'splits'"),
    "no EOS": (
        lambda f: change_manifest(f, lambda m: m["tokenizer"].update(eos_token_id=None)),
        "manifest.json is damaged",
    ),
    "negative": (lambda f: change_manifest(f, lambda m: first_shard(m).update(num_tokens=-1)), "outside its range"),
    "other keys": (lambda f: change_manifest(f, lambda m: first_shard(m).update(size=1)), "manifest.json is damaged"),
    "up and away": (
        lambda f: change_manifest(f, lambda m: first_shard(m).update(file="../train-00000.bin")),
        "'../train-00000.bin' is no name of a shard of train",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_refused(damage: str, folder: Path) -> None:
    do, words = DAMAGES[damage]
    do(folder)
    with pytest.raises(ValueError, match=words):
        PreparedText(folder)


def test_changed_bytes_are_found_when_asked_for(folder: Path) -> None:
    path = folder / "train-00001.bin"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(ValueError, match=r"train-00001\.bin is damaged \(another checksum\)"):
        PreparedText(folder).verify()
    path.write_bytes(content[:-8] + bytes(8))
    with pytest.raises(ValueError, match="its documents do not fit its tokens"):
        PackedRows(PreparedText(folder), "train", 8)[0]


def test_another_tokenizer_or_vocabulary_is_named(prepared: PreparedText, smollm2_tokenizer: Any) -> None:
    prepared.check_tokenizer(TOKENIZER)
    prepared.check_vocab_size(prepared.vocab_size)
    with pytest.raises(ValueError, match=r"vocab_size=101 cannot read .* 'characters' has 102 ids"):
        prepared.check_vocab_size(101)
    with pytest.raises(
        ValueError, match=r"it was 'characters' .*vocab_size 102 -> 49152; eos_token_id 0 -> 2; fingerprint"
    ):
        prepared.check_tokenizer(smollm2_tokenizer)
    swapped = ending_tokenizer()
    swapped.backend_tokenizer.pre_tokenizer = None  # the same vocabulary, other ids of a text
    with pytest.raises(ValueError, match=r"\(fingerprint"):
        prepared.check_tokenizer(swapped)


def test_what_a_tokenizer_was_used_for_does_not_change_it(tmp_path: Path) -> None:
    used = ending_tokenizer()
    used(["a", "abc"], padding=True, truncation=True, max_length=2)
    used.save_pretrained(tmp_path)
    for same in (used, AutoTokenizer.from_pretrained(tmp_path)):
        assert tokenizer_identity(same, "it") == tokenizer_identity(ending_tokenizer(), "it")


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    tokenizer = ending_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(70_000)])
    path = write_jsonl(tmp_path / "large.jsonl", ["ab<69999>c"])
    prepared = prepare(LocalFiles([path]), tokenizer, tmp_path / "out", tokenizer_name="large", validation_share=0)
    assert prepared.dtype == token_dtype(70_102) == "uint32"
    assert documents_in(prepared, "train")[0][2] == 70_101


# Sources


def texts_of(source: Any) -> list[str]:
    found = [item for part in range(source.num_parts) for item in source.read(part)]
    assert all(isinstance(item, Document) for item in found)
    return [item.text for item in found]


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path) -> None:
    texts = ["one\n", "zwei 二", "3 \u2028 x"]
    lines = write_jsonl(tmp_path / "lines.jsonl", texts)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    write_parquet(tmp_path / "table.parquet", text=texts, number=[1, 2, 3])
    for name in ("lines.jsonl", "lines.jsonl.gz", "table.parquet"):
        source = LocalFiles([tmp_path / name])
        assert texts_of(source) == texts
        for first in range(4):
            assert [item.text for item in source.read(0, first)] == texts[first:]  # type: ignore[union-attr]
    (tmp_path / "a.txt").write_text(texts[1], encoding="utf-8-sig")
    assert texts_of(LocalFiles([tmp_path / "a.txt"])) == texts[1:2]
    (tmp_path / "README.md").write_text("not a text")
    (tmp_path / "deep").mkdir()
    lines.rename(tmp_path / "deep" / "lines.jsonl")
    folder = LocalFiles([tmp_path])
    assert texts_of(folder) == [texts[1], *texts, *texts, *texts]
    assert [path.name for path in folder.others] == ["README.md"]
    with pytest.raises(ValueError, match=r"a\.txt is given twice"):
        LocalFiles([tmp_path, tmp_path / "a.txt"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"text": "one"}\n' * 1000)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-9])
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"text": "one"}\n')
    (tmp_path / "cut.parquet").write_bytes(write_parquet(tmp_path / "a.parquet", text=["a"]).read_bytes()[:-5])
    write_parquet(tmp_path / "other.parquet", texts=["a"])
    for name, words in [
        ("cut.jsonl.gz", "is no whole gzip file"),
        ("plain.jsonl.gz", "is no whole gzip file"),
        ("cut.parquet", "cannot be read as a .parquet file"),
        ("other.parquet", "has no column 'text', it has .*Did you mean 'texts'"),
    ]:
        with pytest.raises(ValueError, match=f"{name} {words}"):
            texts_of(LocalFiles([tmp_path / name]))
    numbers = LocalFiles([write_parquet(tmp_path / "numbers.parquet", text=[None])])
    (found,) = numbers.read(0)
    assert "numbers.parquet, row 1: field 'text' holds a NoneType" in str(found)
    with pytest.raises(ValueError, match=r"holds no file of texts: allowed are \.txt"):
        (tmp_path / "empty").mkdir()
        LocalFiles([tmp_path / "empty"])


def test_a_data_set_of_the_hub_is_streamed_file_by_file(tmp_path: Path) -> None:
    """The package datasets takes a folder for a data set just so."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        texts = [f"{number} {row}" for row in range(4)]
        write_parquet(folder / f"train-{number}.parquet", text=texts, dump=["x"] * 4)
    source = HubDataset(str(folder))
    assert source.num_parts == 3 and texts_of(source) == [f"{part} {row}" for part in range(3) for row in range(4)]
    assert [item.text for item in source.read(1, 3)] == ["1 3"]  # type: ignore[union-attr]
    settings: dict[str, Any] = {"tokenizer_name": "characters", "validation_share": 0}
    prepared = prepare(source, TOKENIZER, tmp_path / "out", **settings)
    assert prepared.num_documents("train") == 12 and prepared.manifest["source"]["revision"] == source.revision
    write_parquet(folder / "train-1.parquet", text=["changed"], dump=["x"])
    with pytest.raises(ValueError, match=r"source\.revision"):
        prepare(HubDataset(str(folder)), TOKENIZER, tmp_path / "out", **settings)
    with pytest.raises(ValueError, match="Did you mean 'text'"):
        HubDataset(str(folder), field="txt")
    with pytest.raises(ValueError, match="Bad split: test"):
        HubDataset(str(folder), split="test")
