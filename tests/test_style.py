"""The habits of writing that a program can check: sizes, imports, errors, the environment.

A code line is one that holds a token of code: no blanks, comments or docstrings. A budget is not a
goal: raising one is a commit of its own that says why.
"""

import ast
import functools
import io
import re
import statistics
import tokenize
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

import nanoinfer

ROOT = Path(nanoinfer.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
CPP_FILES = sorted(
    path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.suffix in (".cpp", ".h")
)

# The first pattern that fits a file holds, so exact names stand before `*`.
BUDGETS = {
    "llm.py": 260,
    "config.py": 120,
    "model_config.py": 160,
    "hybrid_config.py": 80,
    "unsupported.py": 80,
    "positions.py": 60,
    "sampling_params.py": 120,
    "prompts.py": 80,
    "request.py": 120,
    "sequence.py": 120,
    "outputs.py": 120,
    "tokenizer.py": 150,
    "scheduler.py": 200,
    "block_manager.py": 200,
    "caches.py": 100,
    "state_pool.py": 150,
    "batch.py": 160,
    "cache_sizes.py": 120,
    "pipeline.py": 60,
    "launched.py": 80,
    "model_runner.py": 200,
    "cpu_graphs.py": 150,
    "cuda_graphs.py": 150,
    "graphs.py": 80,
    "loader.py": 150,
    "checkpoint.py": 100,
    "fp8.py": 70,
    "gguf.py": 190,
    "demo.py": 80,
    "sampler.py": 150,
    "layers/linear.py": 250,
    "layers/rotary_embedding.py": 250,
    "layers/layernorm.py": 150,
    "layers/attention.py": 150,
    "layers/activation.py": 150,
    "layers/embedding.py": 150,
    "layers/gated_delta_net.py": 150,
    "layers/moe.py": 150,
    "layers/quantized_kv_cache.py": 60,
    "layers/attention_backend.py": 40,
    "layers/parameter.py": 80,
    "models/qwen3.py": 250,
    "kernels/*.py": 200,
    "kernels/paged_attention.cpp": 310,
    "kernels/*.cpp": 200,
    "kernels/*.h": 200,
    "*__init__.py": 20,
}
# What a reader of Qwen3's text path reads.
TEXT_PATH = [
    *("llm.py", "config.py", "sampling_params.py", "request.py", "sequence.py", "outputs.py"),
    *("model_config.py", "prompts.py", "tokenizer.py"),
    *("scheduler.py", "block_manager.py", "batch.py", "model_runner.py", "loader.py", "sampler.py"),
    *("layers/linear.py", "layers/rotary_embedding.py", "layers/layernorm.py"),
    *("layers/attention.py", "layers/activation.py", "layers/parameter.py", "models/qwen3.py"),
]
TEXT_PATH_BUDGET = 2300
MAX_FUNCTION_LINES = 40
MAX_MEDIAN_TOKENS = 9  # a line, in the whole package
MAX_MEDIAN_TOKENS_OF_A_FILE = 15  # formulas are denser than the rest, Triton's most

# The order in which a request meets the modules. At the end the data that all stages share: what
# was chosen, asked and returned. gguf and demo have no place: they end in a folder.
STAGES = {
    "llm": 0,
    "pipeline": 0,
    "prompts": 1,
    "request": 1,
    "sequence": 1,
    "tokenizer": 1,
    "scheduler": 2,
    "block_manager": 2,
    "caches": 2,
    "state_pool": 2,
    "batch": 3,
    "cache_sizes": 4,
    "launched": 4,
    "model_runner": 4,
    "cpu_graphs": 4,
    "cuda_graphs": 4,
    "graphs": 4,
    "loader": 4,
    "checkpoint": 4,
    "fp8": 4,
    "sampler": 4,
    "models": 5,
    "layers": 6,
    "kernels": 7,
    "config": 8,
    "model_config": 8,
    "hybrid_config": 8,
    "unsupported": 8,
    "positions": 8,
    "sampling_params": 8,
    "outputs": 8,
}
# Names of an earlier stage that a later one does more with than annotate.
EARLIER_NAMES_USED = {
    ("graphs.py", "batch.Batch"): "worst_batch, to measure memory",
    ("graphs.py", "batch.SamplingBatch"): "the same, of sampling",
    ("cuda_graphs.py", "batch.Batch"): "a static one, to capture with",
    ("launched.py", "scheduler.SampledTokens"): "the type of what it returns",
}
ENVIRONMENT = {"XDG_CACHE_HOME", "CXX", "OMP_NUM_THREADS"}  # where the ecosystem has them


class Source(NamedTuple):
    """One file: its syntax tree, and how many tokens each of its code lines holds."""

    tree: ast.Module
    tokens: dict[int, int]  # line number: tokens that begin there

    def count(self, node: ast.stmt) -> int:
        return sum(node.lineno <= line <= (node.end_lineno or 0) for line in self.tokens)


def parse(text: str) -> Source:
    tree = ast.parse(text)
    lone_strings = set()  # docstrings, of attributes too
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lone_strings.update(range(node.lineno, (node.end_lineno or 0) + 1))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens: dict[int, int] = {}
    depth = 0  # inside an f-string, which Python 3.12 began to split into tokens
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (*layout, tokenize.ENDMARKER):
            continue
        kind = tokenize.tok_name[token.type]
        depth -= kind == "FSTRING_END"
        if token.start[0] not in lone_strings:
            for line in range(token.start[0], token.end[0] + 1):
                tokens.setdefault(line, 0)
            tokens[token.start[0]] += depth == 0 and kind != "FSTRING_END"
        depth += kind == "FSTRING_START"
    return Source(tree, tokens)


@functools.cache
def source(file: str) -> Source:
    return parse((ROOT / file).read_text())


def count_cpp_lines(text: str) -> int:
    """Lines that hold more than blanks and comments; strings may hold // and /*."""
    pattern = r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/'

    def drop(match: re.Match[str]) -> str:
        found = match.group()
        return found if found.startswith('"') else "\n" * found.count("\n")

    return sum(bool(line.strip()) for line in re.sub(pattern, drop, text, flags=re.S).splitlines())


def num_lines(file: str) -> int:
    if file in CPP_FILES:
        return count_cpp_lines((ROOT / file).read_text())
    return len(source(file).tokens)


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imports(tree: ast.Module) -> list[tuple[str, str]]:
    """(module, the name it gets here) of all that is imported; name "" for a whole module."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                is_module = module == "nanoinfer" and alias.name[0].islower()
                whole = (f"nanoinfer.{alias.name}", "")
                found.append(whole if is_module else (module, alias.asname or alias.name))
    return found


def names_at_run_time(tree: ast.Module) -> set[str]:
    """Names used anywhere but in annotations."""
    annotations = set()
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if isinstance(annotation := getattr(node, field, None), ast.AST):
                annotations.update(ast.walk(annotation))
    names = (n for n in ast.walk(tree) if isinstance(n, ast.Name) and n not in annotations)
    return {name.id for name in names}


def environment_reads(tree: ast.Module) -> list[str]:
    """Variables read with os.environ.get("NAME"); "?" for any other use of the environment."""
    found, known = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "os.environ.get":
            name = node.args[0]
            found.append(name.value if isinstance(name, ast.Constant) else "?")
            known.add(node.func.value)  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        words = (getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "name", ""))
        if node not in known and {"environ", "environb", "getenv", "putenv"} & set(words):
            found.append("?")
    return found


EXAMPLE = '''"""Doc

string."""

x = (  # why
    1,
)


def f():
    """Doc."""
    # no
    return f"""{x}
    {x}"""


class A:
    """Doc."""

    b: int = 1
    """It."""
'''


def test_counting():
    found = parse(EXAMPLE)
    assert found.tokens == {5: 3, 6: 2, 7: 1, 10: 5, 13: 2, 14: 0, 17: 3, 20: 5}
    assert found.count(functions(found.tree)[0]) == 3
    assert (
        count_cpp_lines('// a\nint b; // c\n/* d\n\ne */ int f;\n\nauto g = "//";\n#pragma x\n')
        == 4
    )
    tree = ast.parse("from a import B, C\nx: C = B()\ndef f(y: C) -> C: os.environ['D']")
    assert names_at_run_time(tree) == {"x", "B", "os"}
    assert imports(tree) == [("a", "B"), ("a", "C")]
    assert imports(ast.parse("from nanoinfer import batch")) == [("nanoinfer.batch", "")]
    assert environment_reads(tree) == ["?"]
    assert environment_reads(ast.parse("os.environ.get('D'); from os import getenv")) == ["D", "?"]


def test_the_table_is_complete():
    unbudgeted = [f for f in FILES + CPP_FILES if not any(fnmatch(f, p) for p in BUDGETS)]
    assert unbudgeted == []
    stale = [p for p in BUDGETS if not any(fnmatch(f, p) for f in FILES + CPP_FILES)]
    assert stale == []


@pytest.mark.parametrize("file", FILES + CPP_FILES)
def test_file_fits_its_budget(file: str):
    budget = next(BUDGETS[pattern] for pattern in BUDGETS if fnmatch(file, pattern))
    assert num_lines(file) <= budget


def test_text_path_fits_its_budget():
    sizes = {file: num_lines(file) for file in TEXT_PATH}
    assert sum(sizes.values()) < TEXT_PATH_BUDGET, sizes


def test_lines_are_not_dense():
    counts = {file: list(source(file).tokens.values()) for file in FILES}
    assert statistics.median(n for file in FILES for n in counts[file]) <= MAX_MEDIAN_TOKENS
    medians = {file: statistics.median(counts[file]) for file in FILES if len(counts[file]) >= 20}
    dense = {file: n for file, n in medians.items() if n > MAX_MEDIAN_TOKENS_OF_A_FILE}
    assert dense == {}


@pytest.mark.parametrize("file", FILES)
def test_functions_are_short(file: str):
    sizes = {node.name: source(file).count(node) for node in functions(source(file).tree)}
    assert {name: size for name, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}


@pytest.mark.parametrize("file", FILES)
def test_module_has_a_docstring(file: str):
    assert ast.get_docstring(source(file).tree)


@pytest.mark.parametrize("file", FILES)
def test_errors_say_what_happened(file: str):
    """No assert without a message, no untyped except, no print."""
    for node in ast.walk(source(file).tree):
        assert not (isinstance(node, ast.Assert) and node.msg is None), f"line {node.lineno}"
        assert not (isinstance(node, ast.ExceptHandler) and node.type is None), node.lineno
        assert not (isinstance(node, ast.Name) and node.id == "print"), f"line {node.lineno}"


def test_a_later_stage_imports_no_earlier_one():
    """Save for types: what an earlier stage defines may be named in annotations."""
    found = set()
    for file in FILES:
        own = STAGES.get(file.removesuffix(".py").split("/")[0])
        tree = source(file).tree
        used = names_at_run_time(tree)
        for module, name in imports(tree):
            assert not module.startswith("."), f"{file}: relative import of {module}"
            package, _, module = module.partition(".")
            stage = STAGES.get(module.split(".")[0])
            if package != "nanoinfer" or own is None or stage is None or stage >= own:
                continue
            if not name or name in used:
                found.add((file, f"{module}.{name}"))
    assert found == set(EARLIER_NAMES_USED)


def test_kernels_import_only_kernels():
    for file in FILES:
        if file.startswith("kernels/"):
            ours = [m for m, _ in imports(source(file).tree) if m.split(".")[0] == "nanoinfer"]
            assert all(m.startswith("nanoinfer.kernels") for m in ours), (file, ours)


@pytest.mark.parametrize("file", FILES)
def test_environment_is_left_alone(file: str):
    assert set(environment_reads(source(file).tree)) <= ENVIRONMENT
