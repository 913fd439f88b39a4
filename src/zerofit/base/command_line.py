"""Read, change and drop flags of a command line; hide secrets in it."""

import os
import shlex
import sys
from pathlib import Path

from zerofit.base.errors import UserError
from zerofit.base.paths import IN_WHEEL, PROJECT, ROOT

# Options of `zerofit launch`, which may also be among the recipe's flags.
LAUNCH_OPTIONS = (
    "--gpus",
    "--launcher",
    "--port",
    "--nnodes",
    "--node_rank",
    "--master_addr",
    "--join_timeout",
    "--interface",
)


def for_launch(recipe: str, words: list[str]) -> list[str]:
    """Return the arguments of `zerofit launch` for a recipe file, with its options before the recipe's flags."""
    placing = [f"{name}={' '.join(values)}" for name, values, _ in by_flag(words) if name in LAUNCH_OPTIONS]
    flags = drop(words, *LAUNCH_OPTIONS)
    if "--show" in flags:
        placing, flags = [*placing, "--show"], drop(flags, "--show")
    return [*placing, recipe, *flags]


def next_step(verb: str, folder: Path) -> str:
    """Return the next command to type for a run folder or checkpoint; a make command if there is a Makefile."""
    name = shlex.quote(str(folder))
    return f"zerofit {verb} {name}" if PROJECT == IN_WHEEL else f"make {verb} RUN={name}"


def install(extra: str = "") -> str:
    """Return the command that installs the kit or one of its extras; a make command in a checkout."""
    if (ROOT / "Makefile").is_file() and ROOT != IN_WHEEL:
        return f"make install EXTRAS={extra}" if extra else "make install"
    return f"pip install 'zerofit[{extra}]'" if extra else "pip install --upgrade zerofit"


def as_typed() -> str:
    """Return the command line that started this `zerofit` process, as typed, without secrets.

    The Makefile exports its goals, its command-line variables and their names. Variables from the environment
    (launch/make_variables.py) come first.
    """
    goals = os.environ.get("ZEROFIT_GOALS", "")
    if not goals or "MAKELEVEL" not in os.environ:
        return hide_secrets(["zerofit", *sys.argv[1:]])

    def assigned(names: str) -> list[str]:
        values = [(name, os.environ.get(name, "")) for name in os.environ.get(names, "").split()]
        return [f"{n}={shlex.quote(hide_secrets(shlex.split(v)) if n == 'ARGS' else v)}" for n, v in values]

    return " ".join([*assigned("ZEROFIT_FROM_ENVIRONMENT"), "make", goals, *assigned("ZEROFIT_GIVEN")])


def with_extra_flags(flags: list[str], more: str = "", gpus: str = "1") -> tuple[list[str], int]:
    """Return (the recipe's flags followed by the flags in ARGS, number of processes) for a `zerofit` verb.

    Args: more: flags in one string, split as by a shell.
    Raises: UserError for an unclosed quote, or a process count that is not a positive integer.
    """
    count = positive_integer("GPUS=", gpus)
    return [*flags, *split(more, f"ARGS={more}")], count


def positive_integer(named: str, text: str) -> int:
    """Return the value of an option as a number. Args: named: the option as typed. Raises: UserError below 1."""
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{named}{text}: must be a positive integer.")
    return int(text)


def split(text: str, place: str, comments: bool = False) -> list[str]:
    """Return the words of a text, split as by a shell. Raises: UserError for an unclosed quote."""
    try:
        return shlex.split(text, comments)
    except ValueError as error:
        raise UserError(f"{place}: cannot be split into words: {str(error).lower()}.") from None


def expand_auto_batch_size(argv: list[str]) -> list[str]:
    """Replace `--per_device_train_batch_size auto`, which transformers cannot parse, by `--search_batch_size true`."""
    name, flags = "--per_device_train_batch_size", []
    for word in argv:
        flag, _, value = word.partition("=")
        if flag.replace("-", "_")[2:] == name[2:] and value == "auto":
            flags += ["--search_batch_size", "true"]
        elif word == "auto" and flags and flags[-1].replace("-", "_")[2:] == name[2:]:
            flags[-1:] = ["--search_batch_size", "true"]
        else:
            flags.append(word)
    return flags


def by_flag(flags: list[str]) -> list[tuple[str, list[str], list[str]]]:
    """Return (name, values, words) of each flag: --max-steps=2 is ("--max_steps", ["2"], ["--max-steps=2"]).

    Words before the first flag have the name "".
    """
    parts: list[tuple[str, list[str], list[str]]] = []
    for word in flags:
        if word.startswith("--"):
            name, sign, value = word.partition("=")
            parts.append(("--" + name[2:].replace("-", "_"), [value] if sign else [], [word]))
        else:
            if not parts:
                parts.append(("", [], []))
            parts[-1][1].append(word)
            parts[-1][2].append(word)
    return parts


def names(flags: list[str]) -> set[str]:
    """Return the names of the flags, with `_` for `-`."""
    return {name for name, _, _ in by_flag(flags) if name}


def repeated(flags: list[str]) -> list[str]:
    """Return a note on each flag that is set to several values, of which argparse takes the last."""
    values_by_name: dict[str, list[str]] = {}
    for name, values, _ in by_flag(without_secrets(flags)):
        values_by_name.setdefault(name[2:], []).append(" ".join(values))
    return [
        f"{name} {values[-1]}: the last value wins; before it, {', '.join(values[:-1])}"
        for name, values in values_by_name.items()
        if len(set(values)) > 1
    ]


def drop(flags: list[str], *names: str) -> list[str]:
    """Return the command line without these flags and their values; `-` and `_` in names are equivalent."""
    dropped = {name.replace("-", "_") for name in names}
    return [word for name, _, words in by_flag(flags) if name.replace("-", "_") not in dropped for word in words]


def put(flags: list[str], **values) -> list[str]:
    """Return the command line with these flags set; they replace earlier values and come last.

    Args: values: name without `--` -> value; True and False become true and false.
    """
    kept = drop(flags, *(f"--{name}" for name in values))
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}
    return [*kept, *(word for name, text in texts.items() for word in (f"--{name}", text))]


def without_secrets(flags: list[str]) -> list[str]:
    """Return the command line without flags whose name ends in _token (--hub_token), and their values."""
    names = (word.partition("=")[0] for word in flags if word.startswith("--"))
    return drop(flags, *(name for name in names if name.replace("-", "_").endswith("_token")))


def hide_secrets(words: list[str]) -> str:
    """Return a command line as text, with the values of flags that end in _token (--hub_token) hidden."""
    hidden = list(words)
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        if name.startswith("--") and name.replace("-", "_").endswith("_token"):
            if value:
                hidden[i] = f"{name}=<hidden>"
            elif i + 1 < len(words):
                hidden[i + 1] = "<hidden>"
    return shlex.join(hidden)


def value_of(words: list[str], names: tuple[str, ...]) -> str | None:
    """Return the value of the first of these flags (`--flag value` or `--flag=value`); None if absent.

    `-` and `_` in names are equivalent.
    """
    spelled = {name.replace("-", "_") for name in names}
    for i, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name.replace("-", "_") in spelled:
            return value if sign else next(iter(words[i + 1 :]), None)
    return None
