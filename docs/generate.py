"""Write the pages that are made from the code: docs/flags.md, code.md, compatibility.md and coming-from.md.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 where a page is not what the code says
"""

import ast
import json
import sys
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS, SRC = ROOT / "docs", ROOT / "src" / "zerofit"
sys.path.insert(0, str(SRC.parent))

FOLDERS = [
    *("", "base", "job", "data", "data/chat_templates", "data/published"),
    *("model", "model/image_text", "model/weights", "model/kernels", "model/experimental"),
    *("parallel", "objective", "optim", "convert", "config"),
    *("certificate", "checkpoint", "train", "report", "plan", "plan/advice", "plan/speed", "export"),
    *("launch", "commands", "tools", "tools/scores", "tools/servers"),
]

FLAGS = """# Flags

The recipes take these flags and those of transformers' `TrainingArguments`; `python recipes/sft.py --help all` prints
all of them. Some flags of transformers are of no use for this trainer (`--fsdp`, `--dataloader_drop_last`,
`--bf16_full_eval` ...): they are refused with the reason. A flag that nothing reads is refused with the name that was
probably meant. Numbers must be finite and inside the range of their flag, wherever they are written.

Meant on purpose are a learning rate of 0 (everything but the update), `--max_grad_norm 0` (no clipping),
`--save_total_limit 0` (all are kept) and `--hang_timeout 0` (never). `--save_steps` and its kin take shares of all
steps below 1.

A value comes from, the later over the earlier: the default, the bundled task (only without `MODEL` and `DATA`), the
YAML file of `--config`, the flag. `make show sft ...` prints every value with its source.

Defaults that differ from transformers': `--gradient_checkpointing` on (non-reentrant; a start on GPUs [chooses it
with the micro batch](gradient_checkpointing.md#what-a-start-on-gpus-chooses)), `--learning_rate` ({rates}), cosine
schedule with 3 % warm-up, `--save_strategy epoch`, `--save_total_limit 1`, `--logging_steps 10`,
`--per_device_eval_batch_size` 8 or the micro batch, whichever is smaller, `--logging_nan_inf_filter` off (a NaN stops
the run), `--report_to none`. bf16 is on where the GPU has it, fp16 on GPUs that do not, fp32 on CPUs
([precision](precision.md)); a line says which.

<!-- made by docs/generate.py: edit src/zerofit/config/arguments.py -->
"""

CODE = """# The code

```
base < job < data < model < parallel < optim < convert < config < certificate < checkpoint < train < report < plan
    < export < launch < commands < tools < entrypoint.py < recipe.py < cli.py
```

`import zerofit` changes nothing in the process and loads no library. Its public names are `zerofit.Recipe`,
`zerofit.Trainer` (the trainer of the recipes), `zerofit.Technique` and `zerofit.__version__`. Every program of the kit,
and `from zerofit import recipe`, first calls `base/process.py`'s `begin`: torch's allocator, the filters of logs, and
the end of the process with its supervisor.

A folder imports only what stands left of it, and no two files import each other (`tests/test_layers.py`). A file runs
in one kind of process: the launcher (`launch/`), a rank (`train/`) or either.

How a run goes: `recipes/sft.py` → `recipe.parse` (`Settings`: read from the launcher's job, or resolved from flags,
YAML file and DeepSpeed JSON) → `data/` → `recipe.start_processes` (process group, checks, `plan/choice.py`) →
`model/load.py` → `train/trainer.py`, whose loss and metrics are those of the objective (`objective/`). `make sft`
starts `launch/launch.py`, which checks the same things first and then watches the ranks (`launch/supervisor.py`).

The stations of a setting, e.g. of `make sft GPUS=2 ZERO=3`:

1. `launch/make_variables.py`: the variable `ZERO=3` becomes the flag `--zero=3` of `zerofit launch`.
2. `config/parse.py`: flags and YAML file become a `Request` (`job/request.py`), typed values with their sources.
   Whoever changes a job later changes its request, `request.put(zero=3)`, and resolves it again.
3. `config/resolve.py`: preset, defaults and techniques turn the request into `Settings` with a DeepSpeed JSON.
4. `launch/prepare.py` and `plan/choice.py`: data, model and memory are checked; a plan, the search for a micro batch,
   the canary or a retry may change the request.
5. `job/job.py`: the settings are written to `job.json`, which every rank reads (`recipe.parse`).
6. `recipe.start_processes`: what only a rank can know is added (`settings.AFTER_RESOLVING`).
7. `train/trainer.py`: `TrainingArguments(deepspeed=...)` gives them to transformers' Trainer and DeepSpeed's engine.
8. `recipe.open_run_folder`: `job.json` of the run folder, from which `zerofit resume` begins at 3.

`torchrun recipes/sft.py`, `accelerate launch` and `python` begin at 2 in each rank; rank 0 chooses at 4 for all.

Where a library has a public hook, it is used. [The rest](#patches) is listed in `docs/patches.toml` and held by
`tests/model/test_patches.py`; patches of simulated ranks are all in `plan/fake_device.py`.

<!-- made by docs/generate.py: edit the first line of each file -->
"""

PATCHES = """## Patches

<!-- made by docs/generate.py: edit docs/patches.toml -->

Changes to libraries, and private names of theirs that are used, with the library's version of `constraints.txt`. All
names of a row, and the module that has them, are in `docs/patches.toml`. The test fails when the change no longer does
what it is for; `tests/model/test_patches.py` fails when the library has lost the name or made it public, and when a
private name is used that is not listed there.
"""


COMPATIBILITY = """# Which techniques work together

For each technique: what it does not go with, why, and what to use instead. Such a pair is refused before anything is
loaded; every other pair is accepted, at each ZeRO stage. What a technique needs of the machine and of the model is in
[memory](memory.md), [optimizers](optimizers.md), [adapters](adapters.md) and [offload](offload.md).

`tests/config/test_exclusions.py` compares this page with what the kit refuses, for all pairs at stages 0, 2 and 3.
`python -m pytest tests/config/test_exclusions.py -m slow` trains the accepted pairs of 29 techniques.

<!-- made by docs/generate.py: edit the techniques' conflicts in src/zerofit -->
"""


COMING_FROM = """# Coming from another kit

```bash
zerofit convert their.yaml                      # writes their.zerofit.yaml, and says which make line trains with it
zerofit convert their.yaml --gpus 8             # the original ran on 8 GPUs: keep its effective batch on any number
zerofit convert config.yaml accelerate.yaml     # a job's file with its launcher's
make convert FILE=their.yaml
```

It reads files of {kits},
also DeepSpeed's JSON inside them. Whose a file is follows from its keys, or from `--kit`. The new file has our names,
with the original key beside each line. It also has the other kit's defaults: rate, epochs, schedule, warm-up,
weight decay, length, adapter, optimizer, packing and what is in the loss.

Two lists follow in the file and in the terminal. One has the keys without a counterpart, each with the reason or
the nearest way. The other says what differs in meaning. What needs a GPU is written as a comment, since a machine
without one refuses it. A chat template that stands in a file as text becomes a file beside the new one.
`make show sft CONFIG=their.zerofit.yaml` shows what a run would take from the file.

Refused are jobs that nothing here trains: rewards, PPO, GRPO, distillation, images.
Of 41 public files that the tables had not seen 26 trained the same, after mending 39, and of the next 15 files 11
([which, and under which conditions](notes/converted_files.md)).

<!-- made by docs/generate.py: edit the tables in src/zerofit/convert -->
"""


def coming_from() -> str:
    """Return docs/coming-from.md: for each kit its keys with ours, what has none, and what differs."""
    from zerofit.convert import kits, shared

    names = [kit.name for kit in kits.KITS]
    lines = [COMING_FROM.replace("{kits}", f"{', '.join(names[:-1])} and {names[-1]}")]
    for kit in kits.KITS:
        lines += [f"## {kit.name} {kit.version}", "", f"| {kit.name} | here | |", "|---|---|---|"]
        if kit.like:
            own = [rule for rule in kit.rules if rule not in kit.like.rules]
            lines += [*map(_rule, own), "", f"The rest as {kit.like.name}.", ""]
            continue
        lines += map(_rule, kit.rules)
        for theirs, key in kit.keys.items():
            names = ", ".join(f"`{name}`" for name in (theirs, *key.other.split()))
            lines.append(f"| {names} | `{key.ours}` | {_said(key)} |")
        lines += ["", *_lost({why: keys for why, keys in kit.lost.items() if why not in shared.NO_COUNTERPART})]
        lines += (
            ["", *_lost({f"refused, as it {why}": keys for why, keys in kit.refused.items()})] if kit.refused else []
        )
        lines += ["", *(f"{sentence}" for sentence in kit.meaning), ""]
    lines += ["## Keys of several kits without a counterpart", "", *_lost(shared.NO_COUNTERPART)]
    return "\n".join(lines).rstrip() + "\n"


def _rule(rule) -> str:
    return f"| {', '.join(f'`{key}`' for key in rule.keys.split())} | {rule.ours} | {rule.note} |"


def _said(key) -> str:
    """Return the default of a key, and what its values are called here; for one without them its note."""
    default = "" if key.default is None else f"default {key.page or _words(key.default)}"
    values = [f"{_words(theirs)}: {_words(ours)}" for theirs, ours in key.values.items() if ours is not None]
    return "; ".join(filter(None, (default, *values))) or key.note


def _words(value) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _lost(lost: dict[str, str]) -> list[str]:
    return [f"- {', '.join(f'`{key}`' for key in keys.split())}: {why}" for why, keys in lost.items()]


def flags() -> str:
    """Return docs/flags.md: a table for each group of arguments."""
    from zerofit.config import arguments
    from zerofit.job import program

    groups = [
        group for group in vars(arguments).values() if isinstance(group, type) and group.__name__.endswith("Arguments")
    ]
    rates = ", ".join(f"{name} {recipe.defaults['learning_rate']}" for name, recipe in program.kit().items())
    lines = [FLAGS.replace("{rates}", rates)]
    for group in groups:
        lines += [
            f"## {group.__doc__.splitlines()[0].rstrip('.')}",
            "",
            "| flag | default | meaning |",
            "|---|---|---|",
        ]
        for field in fields(group):
            default = (
                ""
                if field.default in (None, MISSING)
                else f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"
            )
            help_text = field.metadata["help"].replace("|", "\\|").replace("%%", "%")
            lines.append(f"| `--{field.name}` | {default} | {help_text} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def compatibility() -> str:
    """Return docs/compatibility.md: the techniques that exclude nothing, then each of the others with its conflicts."""
    from zerofit.config.resolve import TECHNIQUES
    from zerofit.job import groups

    shown = [technique for technique in (*TECHNIQUES, *groups.ways()) if technique.example]
    lines = {technique.name: _conflicts(technique, shown) for technique in shown}
    free = ", ".join(f"{one.name} (`{one.example}`)" for one in shown if not lines[one.name])
    pages = [COMPATIBILITY, f"Nothing excludes: {free}.", ""]
    for technique in shown:
        if lines[technique.name]:
            pages += [
                f"## {technique.name}",
                "",
                f"`{technique.example}` does not go with",
                "",
                *lines[technique.name],
                "",
            ]
    return "\n".join(pages).rstrip() + "\n"


def _conflicts(technique, others) -> list[str]:
    """Return the lines on what a technique excludes, and on the others that exclude it."""
    lines = {}
    for conflict in technique.conflicts:
        argument = _argument(conflict)
        lines.setdefault(argument, f"- {argument}{_stages(conflict)}: {conflict.why}; {conflict.instead}.")
    for other in others:
        for conflict in other.conflicts:
            if other is not technique and conflict.excludes(technique):
                about = f"`{other.example}` ({other.name}){_stages(conflict)}: {conflict.why}; {conflict.instead}."
                if not any(argument.startswith(f"`--{other.flag}") for argument in lines):
                    lines[about] = f"- {about}"
    return list(lines.values())


def _argument(conflict) -> str:
    """Return the values of an argument that a technique excludes, as they are typed."""
    from zerofit.job.technique import AllBut

    words = getattr(conflict.values, "values", conflict.values) or ()
    named = [str(word).lower() if isinstance(word, bool) else str(word) for word in words]
    if conflict.argument == "zero":
        return f"ZeRO stage{'s' * (len(named) > 1)} {', '.join(named)}"
    if isinstance(conflict.values, AllBut):
        return f"`--{conflict.argument}` other than {', '.join(f'`{word}`' for word in named)}"
    return f"`--{' '.join([conflict.argument, *named[:1]])}`" + "".join(f", `{word}`" for word in named[1:])


def _stages(conflict) -> str:
    return f" at ZeRO stage {', '.join(map(str, conflict.stages))}" if conflict.stages else ""


def code() -> str:
    """Return docs/code.md: the first line of every file, by folder, and the table of patches."""
    lines = [CODE]
    for folder in FOLDERS:
        files = sorted(f for f in (SRC / folder).glob("*.py") if not f.name.startswith("__"))
        about = first_line(SRC / folder / "__init__.py") if folder else "Entry points, and what recipes call first"
        lines += [f"## {folder or 'zerofit'}/", "", about, "", "| file | what it does |", "|---|---|"]
        lines += [f"| [{file.name}](../{file.relative_to(ROOT)}) | {first_line(file)} |" for file in files]
        lines.append("")
    lines += [*patches(), ""]
    return "\n".join(lines).rstrip() + "\n"


def patches() -> list[str]:
    """Return the table of docs/patches.toml, with the versions of constraints.txt."""
    versions = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    lines = [PATCHES, "| file | name | of | for | reason | test |", "|---|---|---|---|---|---|"]
    for patch in tomllib.loads((DOCS / "patches.toml").read_text())["patch"]:
        first, *others = patch["names"]
        name, library = f"`{first}`" + (f" and {len(others)} more" if others else ""), patch["of"].partition(".")[0]
        test = patch["test"].replace("::", " ").removeprefix("tests/")
        version, purpose = versions.get(library, ""), patch["purpose"]
        lines.append(f"| {patch['file']} | {name} | {library} {version} | {purpose} | {patch['why']} | {test} |")
    return lines


ACCURACY = ("<!-- made by docs/generate.py from benchmarks/results/published.md -->\n", "<!-- end -->\n")


def with_accuracy(page: Path) -> str:
    """Return a page with its lines between ACCURACY from the result of benchmarks/published.py."""
    lines = (ROOT / "benchmarks" / "results" / "published.md").read_text().splitlines()
    rows = {cells[1]: cells[2:] for line in lines if len(cells := [c.strip() for c in line.split("|")]) > 11}

    one, several = (rows[f"A and B, {kind}"] for kind in ("one GPU", "several GPUs"))
    own, other = (rows[f"A and B, several GPUs, {kind}"] for kind in ("allocated", "other figures"))
    sizes = [cell.lstrip("+-") for row in (one, several) for cell in (row[5], row[6], row[0], row[2], row[8])]
    if page.parent == ROOT:
        text = (
            "- **Memory**: beside figures that others published, plans of one GPU are {} off in the median ({} at\n"
            "  worst), of several GPUs {} ({}) ([points](benchmarks/results/published.md)).\n"
        ).format(*sizes[:2], *sizes[5:7])  # fmt: skip
    else:
        text = (
            "Beside figures that others measured, plans of **one GPU** are {} off in the median, {} at worst ({}),\n"
            "of **several GPUs** {} and {} ({}). Known differences of their programs are added; without them the "
            "medians\nare {} and {}, without one that is only supposed {} and {}; of several GPUs, allocated bytes "
            "alone {} ({}),\nother figures {} ({}) ([points](../benchmarks/results/published.md)).\n"
        ).format(
            *sizes[:3], *sizes[5:8], sizes[3], sizes[8], sizes[4], sizes[9], own[5], own[0], other[5], other[0]
        )  # fmt: skip
    text += _of_speed(page)
    before, rest = page.read_text().split(ACCURACY[0])
    return before + ACCURACY[0] + text + ACCURACY[1] + rest.split(ACCURACY[1])[1]


def _of_speed(page: Path) -> str:
    """Return a line on predicted tokens a second, from the result of benchmarks/published_speeds.py."""
    check = json.loads((ROOT / "benchmarks" / "results" / "published-speeds.json").read_text())["summary"]["check"]
    dense, mixtures = check["dense models"], check["mixtures of experts"]
    if page.parent == ROOT:
        return (
            f"- **Time**: predicted tokens a second of dense models are {dense['median']:.0%} off in the median, "
            f"{dense['within']:.0%} of {dense['n']} within 20%;\n  of mixtures of experts {mixtures['median']:.0%} "
            "([points](docs/notes/published-speeds.md)).\n"
        )
    return (
        f"Tokens a second, at {dense['n'] + mixtures['n']} published speeds that set no rate: dense models "
        f"{dense['median']:.0%} off in the median,\n{dense['within']:.0%} of them within 20%; mixtures "
        f"{mixtures['median']:.0%}, {mixtures['low']:+.0%} to {mixtures['high']:+.0%} "
        "([points](notes/published-speeds.md)).\n"
    )


def first_line(file: Path) -> str:
    """Return the first paragraph of a file's docstring on one line."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def main() -> None:
    pages = {
        DOCS / "flags.md": flags(),
        DOCS / "code.md": code(),
        DOCS / "compatibility.md": compatibility(),
        DOCS / "coming-from.md": coming_from(),
        ROOT / "README.md": with_accuracy(ROOT / "README.md"),
        DOCS / "planning.md": with_accuracy(DOCS / "planning.md"),
    }
    if "--check" in sys.argv:
        stale = [page.name for page, text in pages.items() if not page.exists() or page.read_text() != text]
        if stale:
            raise SystemExit(f"{', '.join(stale)}: not what the code says; run `make docs`")
        return
    for page, text in pages.items():
        page.write_text(text)
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
