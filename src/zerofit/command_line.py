"""Read, change and drop flags of a command line; hide secrets in it."""

import shlex


def with_auto_as_probe(argv: list[str]) -> list[str]:
    """`--per_device_train_batch_size auto` -> `--search_batch_size true`: transformers' flag itself takes numbers only."""
    name, out = "--per_device_train_batch_size", []
    for word in argv:
        flag, _, value = word.partition("=")
        if flag.replace("-", "_")[2:] == name[2:] and value == "auto":
            out += ["--search_batch_size", "true"]
        elif word == "auto" and out and out[-1].replace("-", "_")[2:] == name[2:]:
            out[-1:] = ["--search_batch_size", "true"]
        else:
            out.append(word)
    return out


def drop(flags: list[str], *names: str) -> list[str]:
    """The command line without these flags and their values."""
    kept, skipping = [], False
    for word in flags:
        if word.startswith("--"):
            skipping = word.split("=")[0].replace("-", "_") in {n.replace("-", "_") for n in names}
        if not skipping:
            kept.append(word)
    return kept


def without_secrets(flags: list[str]) -> list[str]:
    """The flags without --hub_token and its like, and their values."""
    names = (word.partition("=")[0] for word in flags if word.startswith("--"))
    return drop(flags, *(name for name in names if name.replace("-", "_").endswith("_token")))


def hide_secrets(words: list[str]) -> str:
    """A command line as text, without the values of --hub_token and its like."""
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
    """The value of the first of these flags on a command line, `--flag value` or `--flag=value`; None without any."""
    for i, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name in names:
            return value if sign else next(iter(words[i + 1 :]), None)
    return None
