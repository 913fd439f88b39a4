"""`zerofit convert`: convert another kit's configuration to a zerofit file for --config."""

import argparse
import shlex
import tempfile
from pathlib import Path

from zerofit.base.errors import UserError, one_line
from zerofit.config import arguments, parse, transformers_flags
from zerofit.convert import keys, kits, page
from zerofit.convert.conversion import UNKNOWN, Conversion, KeyNames, Kit, convert
from zerofit.job import program

MAX_UNKNOWN = 0.3  # share of unknown keys above which the file probably belongs to another kit

RECIPES = ("sft", "lora", "dpo")


def main(argv: list[str]) -> None:
    """Convert the files of a command line (see --help), check the result with zerofit's parser, and write it.

    Raises: UserError for an unknown or unsupported file, or an output file that exists.
    """
    parser = argparse.ArgumentParser(prog="zerofit convert", allow_abbrev=False, description=__doc__)
    known = ", ".join(kit.name for kit in kits.KITS)
    parser.add_argument("files", nargs="*", help=f"YAML or JSON files of one job, of {known}")
    parser.add_argument("--output", default="", help="output file (default NAME.zerofit.yaml here; -: the terminal)")
    parser.add_argument("--recipe", default="", choices=["", *RECIPES], help="the recipe, if it cannot be detected")
    parser.add_argument("--kit", default="", help="the kit of the file, if it cannot be detected")
    parser.add_argument("--gpus", type=int, help="GPUs of the original job; keeps its effective batch on any number")
    parser.add_argument("--keys", choices=[*kits.NAMES], metavar="KIT", help="print the table of a kit's keys")
    args = parser.parse_args(argv)
    if args.keys:
        print("\n".join(keys.page(kits.NAMES[args.keys])))
        return
    if not args.files:
        parser.error("name a file of the other kit")
    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: it must be 1 or more.")
    files = [part for word in args.files for part in ([word] if Path(word).exists() else word.split() or [word])]
    done = convert_files(files, args.kit, args.recipe, args.gpus)
    output = args.output or f"{done.file.stem}.zerofit.yaml"
    text_files = name_texts(done, output)
    command = _command(done, "FILE" if output == "-" else output)
    text = page.text(done, command)
    check(done, text)
    if output == "-":
        print(text, end="")
        return
    _write({output: text} | text_files)
    print(page.summary(done, output, command))


def name_texts(done: Conversion, output: str) -> dict[str, str]:
    """Name the files, next to the output, for texts that arguments read from a file; return {file: text}.

    For output to the terminal (`-`) list these texts as unsupported.
    """
    files = {}
    for name, (key, text) in done.texts.items():
        if output == "-":
            done.lose(key, f"write its text to a file and set {name}: FILE.jinja")
            continue
        file = str(Path(output).with_suffix(".jinja"))
        files[file] = text if text.endswith("\n") else f"{text}\n"
        done.put(name, file, f"{key}, saved to that file")
    return files


def _write(files: dict[str, str]) -> None:
    """Write new files. Raises: UserError if one already exists (then none is written) or cannot be written."""
    for name in files:
        if Path(name).expanduser().exists():
            raise UserError(f"{name}: already exists; remove it, or set --output.")
    for name, content in files.items():
        try:
            Path(name).expanduser().write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{name}: cannot be written: {error.strerror}.") from None


def convert_files(files: list[str], kit: str = "", recipe: str = "", gpus: int | None = None) -> Conversion:
    """Convert a job's file, with processes and sharding from its launcher's files."""
    read = [(Path(file), values := kits.read(file), _kit(file, values, kit)) for file in files]
    jobs = [(file, values, theirs) for file, values, theirs in read if theirs not in kits.LAUNCHERS]
    if len(jobs) > 1:
        raise UserError(f"{jobs[1][0]}: convert one job at a time; {jobs[0][0]} is also a job.")
    launchers = [
        convert(theirs, values, file, recipe=recipe) for file, values, theirs in read if theirs in kits.LAUNCHERS
    ]
    if not jobs:
        done = launchers[0]
        done.recipe = done.recipe or "sft"
        launchers = launchers[1:]
    else:
        file, values, theirs = jobs[0]
        count = next((launcher.lines["gpus"].value for launcher in launchers if "gpus" in launcher.lines), None)
        done = convert(theirs, values, file, gpus or count, recipe, names())
        if not kit:
            _check_kit(done)
    for other in launchers:
        _add(done, other)
    return done


def _kit(file: str, values: dict, name: str) -> Kit:
    """Return the kit that --kit names, or detect it by its keys."""
    kit = kits.NAMES.get(name.lower()) if name else kits.detect(values)[0]
    if kit is None:
        known = ", ".join(kit.name for kit in kits.KITS)
        raise UserError(
            f"--kit {name}: must be one of {known}."
            if name
            else f"{file}: its keys do not identify a kit; set --kit to one of {known}."
        )
    return kit


def _add(done: Conversion, launcher: Conversion) -> None:
    """Add processes, sharding and precision from a launcher's file."""
    prefix = f"{launcher.file.name}: "
    for lines, theirs in ((done.lines, launcher.lines), (done.on_gpus, launcher.on_gpus)):
        for name, line in theirs.items():
            job_line = done.lines.get(name) or done.on_gpus.get(name)
            if name == "use_cpu":
                done.lose(prefix + line.origin, "set use_cpu: true to train on the CPU")
            elif name == "gpus" or (job_line and job_line.value == line.value):
                done.same.append(prefix + line.origin)  # the number of GPUs is in the batch and the command
            elif job_line:
                done.lose(prefix + line.origin, f"the job's file takes precedence ({job_line.origin})")
            else:
                lines[name] = line
    done.same += [prefix + key for key in launcher.same]
    done.lost |= {prefix + key: why for key, why in launcher.lost.items()}
    done.differences += [sentence for sentence in launcher.differences if sentence not in launcher.kit.meaning]


def names() -> KeyNames:
    """Return the recipes' arguments, and the transformers arguments that zerofit ignores."""
    known = {name for recipe in RECIPES for name in parse.argument_names(program.recipe_of(recipe))}
    refused = transformers_flags.REFUSED
    return KeyNames(frozenset(known - refused.keys()), refused)


def check(done: Conversion, text: str) -> None:
    """Raise UserError if the converted file lacks a model or a data path, or has an invalid value."""
    if "model" not in done.lines and done.kit not in kits.LAUNCHERS:
        theirs = next((f" ({name})" for name, key in done.kit.keys.items() if key.ours == "model"), "")
        raise UserError(f"{done.file}: the model is missing{theirs}; add it to the file.")
    for name, line in done.lines.items():
        values = {"model": [line.value], "data": line.value, "eval_data": line.value}.get(name, [])
        for value in values:
            place = value.get("path") if isinstance(value, dict) and name != "model" else value
            if not isinstance(place, str) or not place.strip():
                raise UserError(f"{done.file}: {line.origin}: {value!r} is not a file, a folder or a Hub id.")
    allowed = arguments.ranges(arguments.kit_groups(done.recipe))
    for name, line in done.lines.items():
        words, is_allowed = allowed.get(name, (None, None))
        if words and line.value != "auto":
            is_number = isinstance(line.value, int | float)
            if not is_number or not is_allowed(line.value):
                expected = words if is_number else "a number"
                raise UserError(f"{done.file}: {line.origin} is {line.value}: it must be {expected} ({name}).")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "converted.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            parse.read_yaml(str(file), program.recipe_of(done.recipe))
        except UserError as error:
            message = str(error).replace(str(file), f"{done.file}, converted")
            raise UserError(f"{message} Correct it in {done.file}.") from None


def _check_kit(done: Conversion) -> None:
    """Raise UserError if the detected kit does not have many of the file's keys."""
    unknown = [key for key, why in done.lost.items() if UNKNOWN in why and key in done.values]
    if len(unknown) > max(2, len(done.values) * MAX_UNKNOWN):
        raise UserError(
            f"{done.file}: it looks like a {done.kit.name} file, but {len(unknown)} of its {len(done.values)} keys are "
            f"unknown ({one_line(', '.join(unknown[:3]))}); if it is one, add --kit {done.kit.name}."
        )


def _command(done: Conversion, output: str) -> str:
    """Return the command that trains with the converted file."""
    gpus = done.lines["gpus"].value if "gpus" in done.lines else done.gpus
    groups = [done.lines[name].value for name in ("sp_size", "tp_size") if name in done.lines]
    sizes = [gpus] if gpus else groups
    count = max((size for size in sizes if isinstance(size, int)), default=1)  # other values are rejected later
    rows = "" if "data" in done.lines or done.kit in kits.LAUNCHERS else " DATA=ROWS"
    return f"make {done.recipe}{f' GPUS={count}' if count > 1 else ''}{rows} CONFIG={shlex.quote(output)}"
