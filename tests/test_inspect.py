"""The page about one text: what is on it, that nothing in it is taken for HTML, and what is refused."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

import crosscurrent as cc
from crosscurrent.cli.main import app
from crosscurrent.evaluation.telemetry import effective_memory, lens_logits, trace
from crosscurrent.experiments.inspect import inspect_text, write_page
from crosscurrent.experiments.inspect.measure import visible
from tests.tiny_base import save_opened_retrofit, save_tiny_base

TEXT = 'a <b>"&amp;"\tb\n\x0bc {{ d }} é'
KINDS = ("gates", "norms", "residuals", "memory")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def opened(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_opened_retrofit(base, tmp_path_factory.mktemp("models") / "opened")


def loaded(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["inspect", *(str(argument) for argument in arguments)])


class Page(HTMLParser):
    """Elements of a page, and the text in those of class `text`."""

    def __init__(self, path: Path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        given = dict(attrs)
        self.links += [given[name] or "" for name in ("src", "href", "xlink:href") if name in given]
        if tag == "span":
            self.open.append((given.get("class") or "").split())
            if "text" in self.open[-1]:
                self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and "text" in self.open[-1]:
            self.texts[-1] += data


def test_command_writes_one_page_and_its_figures(opened: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "look.html"
    result = run(opened, "--text", TEXT, "--output", output)
    assert result.exit_code == 0 and str(output) in result.stdout, result.output
    assert {path.name for path in output.parent.iterdir()} == {"look.html", "look_figures"}
    written = {path.name for path in (output.parent / "look_figures").iterdir()}
    assert written == {f"{kind}.{form}" for kind in KINDS for form in ("png", "svg")}
    for kind in KINDS:
        with Image.open(output.parent / "look_figures" / f"{kind}.png") as image:
            assert image.width > 400 and len(set(image.convert("L").getdata())) > 20  # something is drawn
    page = Page(output)
    assert page.tags.count("svg") == len(KINDS) and "script" not in page.tags and "b" not in page.tags
    assert all(link.startswith("#") for link in page.links) and "@import" not in page.source
    ids = re.findall(r'\bid="([^"]+)"', page.source)
    assert len(ids) == len(set(ids))
    first = run(opened, "--text", TEXT, "--output", tmp_path / "again.html")
    assert first.exit_code == 0 and (tmp_path / "again.html").read_text() == page.source


def test_tokens_are_shown_as_they_are(opened: Path, tmp_path: Path) -> None:
    run(opened, "--text", TEXT, "--output", tmp_path / "page.html")
    page = Page(tmp_path / "page.html")
    shown = ["a", "·", "<", "b", ">", '"', "&", "a", "m", "p", ";", '"', "→", "b", "↵", "\\x0b", "c"]
    shown += ["·", "{", "{", "·", "d", "·", "}", "}", "·", "<unk>"]
    assert page.texts[: len(shown)] == shown
    assert "<unk>" not in page.source and "&lt;unk&gt;" in page.source


def test_what_is_shown_is_what_was_measured(opened: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(opened)
    inspection = inspect_text(model, tokenizer, "three plus four")
    ids = torch.tensor([tokenizer("three plus four")["input_ids"]])
    found = trace(model, ids)
    assert torch.equal(inspection.trace.states, found.states) and not inspection.was_cut
    assert len(inspection.tokens) == len(inspection.readings) == len(inspection.predictions) == ids.shape[1] == 15
    lens = lens_logits(model, found.states[0]).softmax(-1)
    for row, (readings, prediction) in enumerate(zip(inspection.readings, inspection.predictions, strict=True)):
        best = lens[row].topk(5)
        assert [reading.text for reading in readings] == [visible(tokenizer, token) for token in best.indices.tolist()]
        assert [reading.probability for reading in readings] == pytest.approx(best.values.tolist(), rel=1e-5)
        assert prediction.text == visible(tokenizer, int(found.logits[0, row].argmax()))
    assert inspection.memory == effective_memory(model, ids, inspection.memory_position, num_directions=16)
    report = model(ids, solver=cc.Jacobi(15, 1)).solver_report
    assert inspection.residuals == pytest.approx(report.residuals.tolist(), rel=1e-4, abs=1e-6)
    page = Page(write_page(inspection, model, "<i>name</i>", tmp_path / "page.html")[0])
    gates = [f"{value:.3f}" for value in found.current_gate[0].tolist()]
    assert re.findall(r'class="gate current"[^>]*>([^<]+)<', page.source) == gates
    gates = [f"{value:.3f}" for value in found.recurrent_gate[0].tolist()]
    assert re.findall(r'class="gate recurrent"[^>]*>([^<]+)<', page.source) == gates
    assert "i" not in page.tags and "&lt;i&gt;name&lt;/i&gt;" in page.source
    hits = sum(p.text == t for p, t in zip(inspection.predictions[:-1], inspection.tokens[1:], strict=True))
    assert page.source.count('class="hit"') == hits


def test_limits_are_kept(opened: Path, tmp_path: Path) -> None:
    model, tokenizer = loaded(opened)
    inspection = inspect_text(model, tokenizer, "one two three", max_tokens=6, iterations=2)
    assert inspection.tokens == ("o", "n", "e", "·", "t", "w") and inspection.was_cut
    assert len(inspection.residuals) == 2
    text = tmp_path / "story.txt"
    text.write_text("one two three", encoding="utf-8")
    assert run(opened, "--file", text, "--max-tokens", 6, "-o", tmp_path / "cut.html").exit_code == 0
    assert "The text goes on" in (tmp_path / "cut.html").read_text()
    assert run(opened, "--file", text, "-o", tmp_path / "whole.html").exit_code == 0
    assert "The text goes on" not in (tmp_path / "whole.html").read_text()


def test_a_fresh_retrofit_and_the_shortest_text_can_be_looked_at(base: Path, tmp_path: Path) -> None:
    model, tokenizer = cc.retrofit(AutoModelForCausalLM.from_pretrained(base), 1, 3), loaded(base)[1]
    inspection = inspect_text(model, tokenizer, "ab")
    assert inspection.openings == (0.0, 0.0) and inspection.trace.change.tolist() == [[0.0, 0.0]]
    assert "0.0%" in write_page(inspection, model, "fresh", tmp_path / "page.html")[0].read_text()


def test_bad_input_is_answered(opened: Path, base: Path, tmp_path: Path) -> None:
    rlt = tmp_path / "rlt"
    cc.RLTForCausalLM(cc.RLTConfig(vocab_size=102, hidden_size=8, intermediate_size=8)).save_pretrained(rlt)
    bare = tmp_path / "bare"
    loaded(opened)[0].save_pretrained(bare)
    loaded(opened)[1].save_pretrained(rlt)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "folder.html").mkdir()
    cases: list[tuple[tuple[object, ...], str]] = [
        ((base, "--text", "abc"), "LlamaForCausalLM has no recurrence"),
        ((rlt, "--text", "abc"), "RLTForCausalLM has no gates"),
        ((bare, "--text", "abc"), "no tokenizer"),
        ((opened, "--text", "a"), "1 tokens"),
        ((opened, "--text", ""), "0 tokens"),
        ((opened, "--text", "a" * 2100, "--max-tokens", 2100), "2048 positions"),
        ((opened, "--file", tmp_path / "missing.txt"), "missing.txt: No such file"),
        ((opened, "--file", tmp_path / "latin.txt"), "not UTF-8"),
        ((opened, "--text", "abc", "-o", tmp_path / "folder.html"), "is a folder"),
    ]
    for arguments, words in cases:
        more = () if "-o" in arguments else ("-o", tmp_path / "page.html")
        result = run(*arguments, *more)
        assert result.exit_code == 1 and result.stdout == "", (arguments, result.output)
        assert words in next(line for line in result.stderr.splitlines() if line.startswith("error: "))
    for wrong in ((opened,), (opened, "--text", "a", "--file", "b"), (opened, "--text", "abc", "-o", "page.png")):
        assert run(*wrong).exit_code == 2
    assert not (tmp_path / "page.html").exists() and not (tmp_path / "page_figures").exists()


def test_parts_of_characters_and_sentencepiece_spaces_are_visible() -> None:
    words = Tokenizer(BPE({"▁of": 0, "of": 1, "<0xE2>": 2}, [], byte_fallback=True))
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    pieces = PreTrainedTokenizerFast(tokenizer_object=words)
    assert [visible(pieces, token) for token in (0, 1, 2, 7)] == ["·of", "of", "<0xE2>", "[7]"]
    level = Tokenizer(BPE({"Ġof": 0, "â": 1}, []))
    level.decoder = decoders.ByteLevel()
    assert [visible(PreTrainedTokenizerFast(tokenizer_object=level), token) for token in (0, 1)] == ["·of", "â"]
