"""Read, change and drop flags of a command line; hide secrets in it."""

import shlex


def with_auto_as_probe(argv: list[str]) -> list[str]:
    """Replace `--per_device_train_batch_size auto` by `--search_batch_size true`.

    transformers' own flag takes numbers only.
    """
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


def drop(flags: list[str], *names: str) -> list[str]:
    """Return the command line without these flags and their values; `-` and `_` in names are the same."""
    kept, skipping = [], False
    for word in flags:
        if word.startswith("--"):
            skipping = word.split("=")[0].replace("-", "_") in {n.replace("-", "_") for n in names}
        if not skipping:
            kept.append(word)
    return kept


def without_secrets(flags: list[str]) -> list[str]:
    """Return the flags without those whose name ends in _token (--hub_token), and without their values."""
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
    """Return the value of the first of these flags (`--flag value` or `--flag=value`); None if absent."""
    for i, word in enumerate(words):
        name, sign, value = word.partition("=")
        if name in names:
            return value if sign else next(iter(words[i + 1 :]), None)
    return None
