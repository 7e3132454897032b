"""The package as a whole: what importing it does, which way its arrows point, and that its public names are documented."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import crosscurrent as cc

PACKAGE = Path(cc.__file__).parent
ORDER = ["recurrence", "models", "tasks", "data", "evaluation", "training", "experiments", "cli"]


def imported_modules(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("folder", ORDER)
def test_arrows_point_one_way(folder: str) -> None:
    above = ORDER[ORDER.index(folder) + 1 :]
    for path in (PACKAGE / folder).rglob("*.py"):
        for module in imported_modules(path):
            assert not any(module.startswith(f"crosscurrent.{name}") for name in above), (path, module)
            if folder == "recurrence":
                assert module.split(".")[0] not in ("transformers", "huggingface_hub"), (path, module)


def test_import_registers_the_models_and_loads_nothing_else() -> None:
    """Nothing beyond what transformers itself loads for a model class."""
    check = (
        "import sys, transformers\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM\n"
        "before = set(sys.modules)\n"
        "import crosscurrent\n"
        "for name in ('crosscurrent_t2mlr', 'crosscurrent_rlt'):\n"
        "    config = transformers.AutoConfig.for_model(name)\n"
        "    assert type(config) in AutoModelForCausalLM._model_mapping, name\n"
        "print(*{name.split('.')[0] for name in sys.modules} - {name.split('.')[0] for name in before})"
    )
    added = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True).stdout.split()
    assert {name for name in added if not name.startswith("_")} == {"crosscurrent"}


def test_public_names_are_documented() -> None:
    for name in cc.__all__:
        thing = getattr(cc, name)
        if not name.startswith("__"):
            assert inspect.getdoc(thing), name
            if inspect.isfunction(thing) or inspect.isclass(thing):
                assert thing.__module__.startswith("crosscurrent"), name


def test_supported_releases() -> None:
    """The declared range, and that the release under test lies in it."""
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    assert major == 5 and minor >= 8
    assert (PACKAGE / "py.typed").exists() and torch.__version__


def test_links_and_figures_in_the_documents_exist() -> None:
    root = PACKAGE.parent
    for page in (root / "README.md", *(root / "docs").glob("*.md"), *(root / "tests").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
