"""Finds sentences that CONTRIBUTING.md forbids, in docstrings, comments and pages.

    python docs/_hooks/plain_english.py            # the paths of `CLEAN`; exits with 1 if there is such a sentence
    python docs/_hooks/plain_english.py PATH …     # others

A path that is clean is added to `CLEAN`, so that it stays so. Pages outside of `NOT_YET` also have no sentence with two
words of `CHAINED`, and no line that begins with ``Of``. Docstrings and comments may still have both.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

__all__ = ["CLEAN", "faults"]

ROOT = Path(__file__).resolve().parents[2]
CLEAN = (
    "README.md",
    "CONTRIBUTING.md",
    "benchmarks",
    "conftest.py",
    "docs",
    "emssd",
    "examples",
    "noxfile.py",
    "plugins/lab/tests",
    "tests/benchmarks",
    "tests/cli",
    "tests/data",
    "tests/docs",
    "tests/gpu",
    "tests/integrations",
    "tests/packaging",
    "tests/model",
    "tests/native",
    "plugins/heads/tests/train",
    *sorted(str(each.relative_to(ROOT)) for each in ROOT.glob("plugins/*/emssd_*")),
)
NOT_YET = ("docs/decisions/0035-planted-faults.md",)  # its table is of the names of faults
MADE = ("docs/reference/options.md", "docs/reference/types.md", "docs/results")  # from docstrings, or by a run

FIRST = re.compile(r"\s*(What|Those|Which|None|Asked)\b")
NO_SUBJECT = re.compile(r"\s*(How|Where|Why|When|Who|Whoever)\b")  # beside these, in what is no test
OF_A_FUNCTION = re.compile(r"\s*(Whether)\b")  # only there it says what is returned
WORDS = ("what became of", "those of (it|them) that", "(told|hears?) of", "held to")
CHAINED = re.compile(r"\b(those|others|what|which|whose|that of)\b", re.IGNORECASE)
CODE = re.compile(
    r"^```[\s\S]*?^```$|^    \S.*$|^#.*$|\*\*[^*\n]{1,60}\.\*\*|`[^`\n]*`|\]\([^)]*\)", re.MULTILINE
)  # and headings, labels, link targets
SENTENCE = re.compile(r"(?:[^.!?;:|\n]|[.!?;:](?!\s)|\n(?!\s*\n|\s*[-*#|>] |\s*\d+\. ))+")
OF = re.compile(r"^Of\b", re.MULTILINE)
ANYWHERE = re.compile(rf"\b({'|'.join(WORDS)})\b".replace(" ", r"\s+"), re.IGNORECASE)


def faults(path: Path) -> Iterator[tuple[int, str]]:
    """Line and words of each fault in a file of Python or Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _matches(1, text)
        if not any(path == ROOT / part for part in NOT_YET):
            yield from _chains(text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                line, is_function = node.body[0].lineno, isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                first = FIRST.match(docstring)
                if "tests" not in path.parts:
                    first = first or NO_SUBJECT.match(docstring)
                    first = first or (None if is_function else OF_A_FUNCTION.match(docstring))
                if first:
                    yield line, f"a docstring begins with {first[1]!r}"
                yield from _matches(line, docstring)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _matches(token.start[0], token.string)


def _matches(line: int, text: str) -> Iterator[tuple[int, str]]:
    for match in ANYWHERE.finditer(text):
        yield line + text.count("\n", 0, match.start()), repr(" ".join(match[0].split()))


def _chains(text: str) -> Iterator[tuple[int, str]]:
    """Line and words of each sentence of a page with two words of `CHAINED`; lines that begin with ``Of``."""
    prose = CODE.sub(lambda code: "\n" * code[0].count("\n"), text)
    for sentence in SENTENCE.finditer(prose):
        if len(words := CHAINED.findall(sentence[0])) > 1:
            yield 1 + prose.count("\n", 0, sentence.start()), f"a sentence with {' and '.join(map(repr, words))}"
    for match in OF.finditer(prose):
        yield 1 + prose.count("\n", 0, match.start()), "a line begins with 'Of'"


def files(path: Path) -> list[Path]:
    """The Python and Markdown files of a folder, without those that are made."""
    found = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.suffix in (".py", ".md"))
    return [each for each in found if not str(each.relative_to(ROOT)).startswith(MADE)]


def main(paths: list[str]) -> int:
    count = 0
    for path in paths or CLEAN:
        for file in files((ROOT / path).resolve()):
            for line, words in faults(file):
                print(f"{file.relative_to(ROOT)}:{line}: {words}")
                count += 1
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
