"""Find phrases that a reader has to decode, in strings, docstrings, comments and pages: `make lint` runs this.

    python tests/wording.py               # everything
    python tests/wording.py src/zerofit/plan docs/memory.md
    python tests/wording.py --count       # how often each phrase occurs

A pattern is matched without regard to case. A line that has to keep a phrase (text of another program, a quotation)
ends with `wording: keep`.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACES = ["src", "recipes", "launchers", "deepspeed_configs", "docs", "Makefile", "README.md", "CONTRIBUTING.md",
          "CHANGELOG.md", "SECURITY.md", "llms.txt"]  # fmt: skip
NOT = "is not a ..., is incomplete, does not have a ..."
NOUN = "the noun: excluded settings, the loss"
AFTER_WHAT = (
    "is are was were a an the has have had it they each every no its one nothing does do did must can would will may "
    "needs goes comes holds follows stands"
).replace(" ", "|")
PATTERNS = {  # pattern: what to write
    r"\b(is|are|was|were|has|have) no (?!longer|more|less|sense|need|effect|\w+s?\b (in|of|to|for) )(?=\w)": NOT,
    r"\b(is|are|was|were|has|have) none\b": "does not exist, is not set; 'None if ...'",
    r"\b(go|goes|going|went|gone) on\b": "continues",
    r"\b(go|goes|gone|went) back to\b": "falls back to, returns to",
    r"\bof (one's|its|their|your|our|a|an|my) own\b": "custom, the user's",
    r"\bbeside\b": "besides, next to, compared with, in addition to",
    rf"\bwhat ({AFTER_WHAT})\b(?![^.;:]*\?)": NOUN,
    r"\b(that|those) of\b": "repeat the noun",
    r"\b(say|says|said|tell|tells|told|knows|knew)\b": "reports, sets, specifies; programs do not speak",
    r"\bwhole\b": "full, complete, entire",
    r"\bat once\b": "immediately, in parallel",
    r"\bso many\b": "this many",
    r"\bas far as\b": "if, up to",
    r"\b(stands|stood)\b": "is in",
    r"\b(mend|mends|mended|mending)\b": "fix",
    r"\bkin\b": "similar flags",
    r"\bnobody\b": "the passive, or name who",
    r"\b(refused|meant|needed|left|shown|kept|written) (is|are)\b": "subject first: ... is refused",
}
NAMES = {  # participle as the name of a variable or attribute: a noun instead
    "said": "message, words", "told": "reported", "asked": "request, requested", "found": "matches, checkpoint, entry",
    "whole": "full, total, complete", "own": "custom, local", "given": "arguments, values, explicit",
}  # fmt: skip
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # Python 3.12 splits f-strings
COMMENT_PATTERNS = {r"^#\s*of\b": "begin with the noun: '# tokens per row'"}
KEEP = "wording: keep"


def python_texts(tokens: list[tokenize.TokenInfo]):
    """Yield (line number, text, whether it is a comment) for each line of a comment or string."""
    for token in tokens:
        if token.type == tokenize.COMMENT or token.type in STRINGS:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line, token.type == tokenize.COMMENT


def page_texts(text: str):
    """Yield the lines of a page outside its code blocks and without code in backquotes."""
    code = False
    for number, line in enumerate(text.splitlines(), 1):
        code ^= line.lstrip().startswith("```")
        if not code:
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line), False


def findings(path: Path):
    """Yield (line number, phrase, advice) for each phrase in a file."""
    text = path.read_text()
    lines = text.splitlines()
    is_code = path.suffix == ".py"
    tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)] if is_code else []
    for number, line, comment in python_texts(tokens) if is_code else page_texts(text):
        if KEEP in lines[number - 1]:
            continue
        for pattern, advice in (PATTERNS | COMMENT_PATTERNS if comment else PATTERNS).items():
            for match in re.finditer(pattern, line, re.I):
                yield number, match[0].strip(), advice
    for token in tokens:
        if token.type == tokenize.NAME and token.string in NAMES and KEEP not in token.line:
            yield token.start[0], token.string, f"name it by a noun: {NAMES[token.string]}"


def files(places: list[str]) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", *places], cwd=ROOT, capture_output=True,
                            text=True, check=True)  # fmt: skip
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return [
        path for path in paths if path.exists() and (path.suffix in (".py", ".md", ".txt") or path.name == "Makefile")
    ]


def main(arguments: list[str]) -> int:
    counts: Counter[str] = Counter()
    for path in files([a for a in arguments if a != "--count"] or PLACES):
        for number, phrase, advice in findings(path):
            counts[advice] += 1
            if "--count" not in arguments:
                print(f"{path.relative_to(ROOT)}:{number}: {phrase!r}: {advice}")
    if "--count" in arguments:
        print("\n".join(f"{count:6} {advice}" for advice, count in counts.most_common()))
    return int(bool(counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
