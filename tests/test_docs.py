"""What the pages say is so: sizes are measured, links resolve, cited code exists."""

import ast
import doctest
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import nanoinfer

ROOT = Path(__file__).parent.parent
SITE = Path(nanoinfer.__file__).parent.parent  # the package may be an installed one
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]

if not (ROOT / "scripts" / "sizes.py").is_file():
    pytest.skip("needs a checkout", allow_module_level=True)


def sizes_table() -> str:
    spec = importlib.util.spec_from_file_location("sizes", ROOT / "scripts" / "sizes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.table()


def test_readmes_table_of_sizes_is_measured() -> None:
    """Run `python scripts/sizes.py` and paste its output where this fails."""
    assert sizes_table() in (ROOT / "README.md").read_text()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_between_pages_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_cited_code_exists(page: Path) -> None:
    """`nanoinfer/scheduler.py::Scheduler.schedule` names a class or function of that file."""
    for file, name in re.findall(r"`(nanoinfer/[\w/]+\.py)::([\w.]+)`", page.read_text()):
        tree = ast.parse((SITE / file).read_text())
        for part in name.split("."):
            found = [
                node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == part
            ]
            assert found, f"{page.name} cites {file}::{name}"
            tree = found[0]


@pytest.mark.network
@pytest.mark.parametrize("page", [page for page in PAGES if ">>>" in page.read_text()])
def test_a_session_on_a_page_prints_what_it_shows(page: Path) -> None:
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_on_a_page_parses_and_imports_what_exists(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)
    for block in [block for block in blocks if ">>>" not in block]:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("nanoinfer"):
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)
