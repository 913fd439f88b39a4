"""`zerofit convert`: write another kit's configuration in our names, as a file for --config."""

import argparse
import shlex
import tempfile
from pathlib import Path

from zerofit.base.errors import UserError, one_line
from zerofit.config import arguments, parse, transformers_flags
from zerofit.convert import kits, page
from zerofit.convert.conversion import UNKNOWN, Conversion, Kit, Names, convert
from zerofit.job import program

MOST_UNKNOWN = 0.3  # of a file's keys: more, and more than two, are those of another kit

RECIPES = ("sft", "lora", "dpo")


def main(argv: list[str]) -> None:
    """Convert the files of a command line (see --help), check the result with our own parser, and write it.

    Raises: UserError for a file of no known kit, a job that nothing here trains, or an output file that is there.
    """
    parser = argparse.ArgumentParser(prog="zerofit convert", allow_abbrev=False, description=__doc__)
    known = ", ".join(kit.name for kit in kits.KITS)
    parser.add_argument("files", nargs="+", help=f"their YAML or JSON files, of one job: {known}")
    parser.add_argument(
        "--output", default="", help="the file to write (default NAME.zerofit.yaml here; -: the terminal)"
    )
    parser.add_argument(
        "--recipe", default="", choices=["", *RECIPES], help="where the file does not say what it trains"
    )
    parser.add_argument("--kit", default="", help="whose file it is, where its keys do not say")
    parser.add_argument("--gpus", type=int, help="GPUs of the original: write its effective batch, for any number here")
    args = parser.parse_args(argv)
    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: it must be 1 or more.")
    files = [part for word in args.files for part in ([word] if Path(word).exists() else word.split() or [word])]
    done = of_files(files, args.kit, args.recipe, args.gpus)
    output = args.output or f"{done.file.stem}.zerofit.yaml"
    beside = name_texts(done, output)
    command = _command(done, "FILE" if output == "-" else output)
    text = page.text(done, command)
    check(done, text)
    if output == "-":
        print(text, end="")
        return
    _write({output: text} | beside)
    print(page.summary(done, output, command))


def name_texts(done: Conversion, output: str) -> dict[str, str]:
    """Name the files beside the output for the texts that arguments take from a file; return {file: text}.

    In the terminal (`-`) they are listed as without a counterpart.
    """
    files = {}
    for name, (key, text) in done.texts.items():
        if output == "-":
            done.lose(key, f"write its text to a file and name it: {name}: FILE.jinja")
            continue
        file = str(Path(output).with_suffix(".jinja"))
        files[file] = text if text.endswith("\n") else f"{text}\n"
        done.put(name, file, f"{key}, whose text is in that file")
    return files


def _write(files: dict[str, str]) -> None:
    """Write new files, all or, where one is there already, none.

    Raises: UserError for one that is there already or cannot be written.
    """
    for name in files:
        if Path(name).expanduser().exists():
            raise UserError(f"{name}: is there already; remove it, or name another with --output.")
    for name, content in files.items():
        try:
            Path(name).expanduser().write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(f"{name}: cannot be written: {error.strerror}.") from None


def of_files(files: list[str], kit: str = "", recipe: str = "", gpus: int | None = None) -> Conversion:
    """Return the conversion of a job's file; those of its launcher add how it is sharded."""
    read = [(Path(file), values := kits.read(file), _kit(file, values, kit)) for file in files]
    read.sort(key=lambda one: one[2] in kits.LAUNCHERS)
    jobs = [one for one in read if one[2] not in kits.LAUNCHERS]
    if len(jobs) > 1:
        raise UserError(f"{jobs[1][0]}: one job at a time, {jobs[0][0]} is one too.")
    launchers = [
        convert(theirs, values, file, recipe=recipe) for file, values, theirs in read if theirs in kits.LAUNCHERS
    ]
    if not jobs:
        done = launchers[0]
        done.recipe = done.recipe or "sft"
        launchers = launchers[1:]
    else:
        file, values, theirs = jobs[0]
        count = next((one.lines["gpus"].value for one in launchers if "gpus" in one.lines), None)
        done = convert(theirs, values, file, gpus or count, recipe, names())
        if not kit:
            _check_kit(done)
    for other in launchers:
        _add(done, other)
    return done


def _kit(file: str, values: dict, name: str) -> Kit:
    """Return the kit that --kit names, or whose keys a file has."""
    found = kits.NAMES.get(name.lower()) if name else kits.detect(values)[0]
    if found is None:
        known = ", ".join(kit.name for kit in kits.KITS)
        raise UserError(
            f"--kit {name}: must be one of {known}."
            if name
            else f"{file}: is of no kit known here by its keys ({known}); name it with --kit."
        )
    return found


def _add(done: Conversion, launcher: Conversion) -> None:
    """Add what a launcher's file says of processes, sharding and precision."""
    of_file = f"{launcher.file.name}: "
    for lines, theirs in ((done.lines, launcher.lines), (done.on_gpus, launcher.on_gpus)):
        for name, line in theirs.items():
            decided = done.lines.get(name) or done.on_gpus.get(name)
            if name == "use_cpu":
                done.lose(of_file + line.origin, "use_cpu: true trains on the CPU of a machine with GPUs too")
            elif name == "gpus" or (decided and decided.value == line.value):
                done.same.append(of_file + line.origin)  # the number of GPUs is in the batch and the command
            elif decided:
                done.lose(of_file + line.origin, f"the job's file decides ({decided.origin})")
            else:
                lines[name] = line
    done.same += [of_file + key for key in launcher.same]
    done.lost |= {of_file + key: why for key, why in launcher.lost.items()}
    done.differs += [sentence for sentence in launcher.differs if sentence not in launcher.kit.meaning]


def names() -> Names:
    """Return the arguments of the recipes, and those of transformers that have no effect here."""
    known = {name for recipe in RECIPES for name in parse.argument_names(program.recipe_of(recipe))}
    refused = transformers_flags.REFUSED
    return Names(frozenset(known - refused.keys()), refused)


def check(done: Conversion, text: str) -> None:
    """Raise UserError where the converted file cannot run as theirs would.

    It names no model, with which the bundled one would train, or a data set without a place, or our own parser refuses
    a value.
    """
    if "model" not in done.lines and done.kit not in kits.LAUNCHERS:
        theirs = next((f" ({key})" for key, one in done.kit.keys.items() if one.ours == "model"), "")
        raise UserError(f"{done.file}: names no model{theirs}, so that nothing of it can be trained.")
    for name, line in done.lines.items():
        values = {"model": [line.value], "data": line.value, "eval_data": line.value}.get(name, [])
        for value in values:
            place = value.get("path") if isinstance(value, dict) and name != "model" else value
            if not isinstance(place, str) or not place.strip():
                raise UserError(f"{done.file}: {line.origin}: {value!r} is no name of a file, a folder or of the Hub.")
    allowed = arguments.ranges(arguments.kit_groups(done.recipe))
    for name, line in done.lines.items():
        words, is_allowed = allowed.get(name, (None, None))
        if words and line.value != "auto":
            is_number = isinstance(line.value, int | float)
            if not is_number or not is_allowed(line.value):
                what = words if is_number else "a number"
                raise UserError(f"{done.file}: {line.origin} is {line.value}: it must be {what} ({name}).")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "converted.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            parse.read_yaml(str(file), program.recipe_of(done.recipe))
        except UserError as error:
            said = str(error).replace(str(file), f"{done.file}, converted")
            raise UserError(f"{said} Correct it in {done.file}.") from None


def _check_kit(done: Conversion) -> None:
    """Raise UserError for a file of which many keys are not the kit's that the others seem to say."""
    unknown = [key for key, why in done.lost.items() if UNKNOWN in why and key in done.given]
    if len(unknown) > max(2, len(done.given) * MOST_UNKNOWN):
        raise UserError(
            f"{done.file}: {len(unknown)} of its {len(done.given)} keys are unknown to {done.kit.name}, whose file it "
            f"seems to be ({one_line(', '.join(unknown[:3]))}); if it is, name it: --kit {done.kit.name}."
        )


def _command(done: Conversion, output: str) -> str:
    """Return the line that trains with the converted file."""
    gpus = done.lines["gpus"].value if "gpus" in done.lines else done.gpus
    groups = [done.lines[name].value for name in ("sp_size", "tp_size") if name in done.lines]
    sizes = [gpus] if gpus else groups
    count = max((size for size in sizes if isinstance(size, int)), default=1)  # another value is refused later
    rows = "" if "data" in done.lines or done.kit in kits.LAUNCHERS else " DATA=ROWS"
    return f"make {done.recipe}{f' GPUS={count}' if count > 1 else ''}{rows} CONFIG={shlex.quote(output)}"
