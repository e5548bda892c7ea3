"""Print the README's table of files: what each does, and its lines of code.

A line of code is one with a token that is no comment and no docstring; `tests/test_style.py` counts
the same way and holds the README to this output.

    python scripts/sizes.py
"""

import ast
import io
import tokenize
from pathlib import Path

import nanoinfer

PACKAGE = Path(nanoinfer.__file__).parent
# In the order in which a request meets them.
FILES = [
    "llm.py",
    "config.py",
    "sampling_params.py",
    "checkpoint.py, loader.py, fp8.py",
    "*_config.py",
    "unsupported.py",
    "gguf.py",
    "demo.py",
    "prompts.py",
    "tokenizer.py",
    "request.py",
    "sequence.py",
    "positions.py",
    "scheduler.py",
    "caches.py",
    "block_manager.py",
    "state_pool.py",
    "batch.py",
    "model_runner.py",
    "cache_sizes.py",
    "*graphs.py",
    "models/qwen3.py",
    "layers/*",
    "kernels/*",
    "sampler.py",
    "outputs.py",
]
_GROUPS = {
    "checkpoint.py, loader.py, fp8.py": "From a model's name to a folder, from tensors to a model",
    "*_config.py": "What the checkpoint is: facts, read from its config.json",
    "*graphs.py": "Decoding without Python between kernels: recorded on a CPU, captured on a GPU",
    "layers/*": "A part of a decoder layer a file: linear, norm, rotary, attention, delta net, ...",
    "kernels/*": "One op a file: formula and reference, and its C++ twin; their table and build",
}
_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count_lines(text: str) -> int:
    """Lines of Python code in `text`, without blanks, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def count_file(path: Path) -> int:
    text = path.read_text()
    if path.suffix == ".py":
        return count_lines(text)
    stripped = (line.strip() for line in text.splitlines())
    return sum(bool(line) and not line.startswith("//") for line in stripped)


def table() -> str:
    rows = ["| file | what it does | lines |", "| --- | --- | ---: |"]
    for name in FILES:
        if name in _GROUPS:
            found = (path for part in name.split(", ") for path in PACKAGE.glob(part))
            paths = sorted(path for path in found if path.is_file())
            what = _GROUPS[name]
        else:
            paths = [PACKAGE / name]
            docstring = ast.get_docstring(ast.parse(paths[0].read_text())) or ""
            what = docstring.splitlines()[0].rstrip(".")
        rows.append(f"| `{name}` | {what} | {sum(map(count_file, paths))} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
