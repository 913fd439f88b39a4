"""Count the keys of a file: each is in a line of the converted file, or in one of its lists."""

import re


def keys_of(value, path=()):
    """Yield the path of each key that has no keys below it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from list(keys_of(inner, (*path, str(key)))) or [(*path, str(key))]
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, path)


def summary_text(done):
    """Return what the converted file says, without the time that YAML takes."""
    lines = [f"{name}: {line.value} {line.origin}" for name, line in (done.lines | done.on_gpus).items()]
    return "\n".join([*lines, *done.chosen_by, *done.differences, *done.lost, *done.same])


def uncounted(theirs, done, text):
    """Return the keys of a file that its conversion says nothing of. A listed key speaks for those below it."""
    listed = {place.rpartition(": ")[2] for place in (*done.lost, *done.same)} | {*done.lost, *done.same}
    missing = []
    for path in keys_of(theirs):
        above = {".".join(path[:end]) for end in range(1, len(path) + 1)} | {*path[1:]}
        if not above & listed and not re.search(rf"(?<!\w){re.escape(path[-1])}(?!\w)", text):
            missing.append(".".join(path))
    return missing
