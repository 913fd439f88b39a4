"""Check the variables of a make line, and turn those that a verb reads into the flags of its command.

The Makefile calls it without words before anything else, then for each verb as `make_variables.py VERB COMMAND ...`.
Standard library only: it runs before the installation.
"""

import difflib
import os
import re
import shlex
import sys
from collections.abc import Mapping

# What a verb adds to its command, word by word. A name in capitals is a variable that the verb reads. Where it has a
# value, ZERO is --zero=VALUE, SP:sp_size is --sp_size=VALUE, RUN: is the value itself, MERGE? is --merge (not for 0),
# ARGS+ is the words of the value, and recipes/RECIPE.py a recipe's file. (EXTRAS) is read by the Makefile's own line.
# [--show] stands there after `make show`. {place} and {nodes} follow from HOSTS and NODES: see _template.
KNOBS = "ZERO OFFLOAD SP:sp_size TP:tp_size PP:pp_size MODEL DATA CONFIG OUT:output_dir"
TRAIN = "{place} PORT ARGS [--show]"
ON_HOSTS = "hosts HOSTS INCLUDE EXCLUDE GPUS MASTER_ADDR JOIN_TIMEOUT INTERFACE"
HERE = "launch HOSTS GPUS LAUNCHER {nodes}"
OF_NODE = "NODE_RANK MASTER_ADDR JOIN_TIMEOUT INTERFACE"
VERBS = {
    **{name: f"{TRAIN} recipes/{name}.py {KNOBS}" for name in ("sft", "lora", "dpo", "pipeline")},
    **dict.fromkeys(["launch", "show"], f"{TRAIN} recipes/RECIPE.py {KNOBS}"),
    "resume": "resume LAUNCHER PORT GPUS RECIPE ARGS {nodes} RUN: ZERO OFFLOAD SP:sp_size TP:tp_size PP:pp_size",
    "convert": "convert OUT:output FILE: ARGS+",
    "export": "export MERGE? DTYPE FOR LLAMA_CPP OUT:output_dir RUN: ARGS+",
    "chat": "chat RUN: ARGS+",
    "eval": "eval RUN: TASKS GPUS ARGS+",
    "report": "report RUN: ARGS+",
    "watch": "watch RUN: ARGS+",
    "slurm": "slurm NODES GPUS SBATCH SWEEP SETUP IMAGE JOIN_TIMEOUT INTERFACE PORT ARGS [--print] "
    f"recipes/RECIPE.py {KNOBS}",
    "status": "status RUN:",
    "cancel": "cancel RUN: ARGS+",
    "doctor": "doctor GPUS PORT OUT:output_dir NODES ARGS+",
    "plan": f"plan RECIPE GPUS ARGS NODES GPU_TYPE METHOD HOST_MEMORY {KNOBS}",
    "batch-size": f"batch-size RECIPE GPUS ARGS {KNOBS}",
    "data": "data RECIPE ARGS MODEL DATA CONFIG OUT:output_dir [--show]",
    "calibrate": "calibrate",
    "reproduce": "GPUS OUT:output_dir RECIPE: ARGS+",
    "install": "(EXTRAS)",
    "ledger": "MODEL GPUS SEQ ARGS+",
    "image": "(IMAGE)",
    "image-cpu": "(IMAGE) ARGS+",
    **dict.fromkeys("plan-validate reliability test-versions models bench-peers".split(), "ARGS+"),
    **dict.fromkeys("gpu-first lint test test-gpu test-cluster test-all docs docs-serve examples clean".split(), ""),
    **dict.fromkeys("wheelhouse sbom audit site".split(), ""),
}

# {verb: what is said where a variable that the sentence names is missing}
REQUIRED = {
    **dict.fromkeys(["resume", "watch", "status", "cancel"], "name the run folder with RUN=runs/..."),
    "convert": "name their YAML file with FILE=...",
    "export": "name what to export with RUN=runs/...",
    "chat": "name what to talk to with RUN=runs/...",
    "eval": "name RUN=runs/... and TASKS=..., names or folders",
    "report": 'name the run folders with RUN="runs/..."',
    "reproduce": "name a folder of examples/reproduce with RECIPE=...",
}

SHOWN = {"sft", "lora", "dpo", "pipeline", "launch", "data", "slurm"}  # `make show lora` shows what `make lora` runs

VARIABLE = re.compile(r"[A-Z][A-Z_]+")
VARIABLES = sorted({*VARIABLE.findall(" ".join([*VERBS.values(), ON_HOSTS, HERE, OF_NODE]))})

# Others that the Makefile or make itself knows.
OF_MAKE = """PYTHON ENV PY PIP PREFIX STAMP DEV_STAMP PEERS_STAMP SHELL .SHELLFLAGS MAKE MAKEFLAGS MFLAGS MAKEFILES
MAKESHELL VPATH CURDIR PATH""".split()

# {make variable: names that other tools use for it}
SYNONYMS = {
    "ZERO": "STAGE ZERO_STAGE DEEPSPEED_STAGE DEEPSPEED ZERO_LEVEL",
    "GPUS": "GPU_COUNT NUM_GPU NUM_GPUS N_GPU N_GPUS NGPU NGPUS NUM_PROCESSES NPROC NPROC_PER_NODE WORLD_SIZE DEVICES",
    "NODES": "NNODES NUM_NODES N_NODES NUM_MACHINES MACHINES",
    "NODE_RANK": "MACHINE_RANK RANK",
    "MASTER_ADDR": "MASTER MASTER_ADDRESS MAIN_PROCESS_IP",
    "PORT": "MASTER_PORT MAIN_PROCESS_PORT",
    "MODEL": "BASE_MODEL MODEL_NAME MODEL_PATH MODEL_NAME_OR_PATH",
    "DATA": "DATASET DATASETS DATASET_NAME DATA_PATH TRAIN_FILE TRAIN_DATA",
    "OUT": "OUTPUT OUTPUT_DIR OUT_DIR",
    "HOSTS": "HOSTFILE HOST_FILE",
    "CONFIG": "CONFIG_FILE YAML",
    "GPU_TYPE": "GPU GPU_NAME",
    "SEQ": "SEQ_LEN SEQ_LENGTH",
    "ARGS": "FLAGS ARG EXTRA_ARGS OPTIONS OPTS",
    "RUN": "RUN_DIR CHECKPOINT RESUME RESUME_FROM_CHECKPOINT",
    "LAUNCHER": "LAUNCH",
    "OFFLOAD": "CPU_OFFLOAD",
    "SP": "SP_SIZE SEQUENCE_PARALLEL SEQUENCE_PARALLEL_SIZE ULYSSES",
    "TP": "TP_SIZE TENSOR_PARALLEL TENSOR_PARALLEL_SIZE AUTOTP",
    "PP": "PP_SIZE PIPELINE_PARALLEL PIPELINE_PARALLEL_SIZE STAGES",
}

# {flag: names of make variables that users try for it}
FLAGS = {
    "--effective_batch_size N": "BATCH BATCH_SIZE BS",
    "--learning_rate N": "LR LEARNING_RATE",
    "--num_train_epochs N": "EPOCHS NUM_EPOCHS NUM_TRAIN_EPOCHS",
    "--max_steps N": "STEPS MAX_STEPS",
    "--max_length N": "MAX_LENGTH MAX_LEN MAX_SEQ_LENGTH CUTOFF_LEN",
    "--lora_r N": "LORA_R LORA_RANK",
    "--seed N": "SEED",
}

# {variable: the one without which it is not read}
NEEDS = {
    "INCLUDE": "HOSTS",
    "EXCLUDE": "HOSTS",
    "NODE_RANK": "NODES",
    "MASTER_ADDR": "NODES",
    "JOIN_TIMEOUT": "NODES",
    "INTERFACE": "NODES",
}

LISTED = 8  # most verbs that a message lists; a variable that more of them read belongs to training


def suggestion(name: str) -> str:
    """Return what to write instead of an unknown variable."""
    normalized = name.upper().replace("-", "_")
    if flag := next((flag for flag, others in FLAGS.items() if normalized in others.split()), None):
        return f'it is a flag: ARGS="{flag}".'
    synonym = next((variable for variable, others in SYNONYMS.items() if normalized in others.split()), None)
    close = [synonym] if synonym else difflib.get_close_matches(normalized, [*VARIABLES, "PYTHON", "ENV"], 1, 0.75)
    if close:
        return f"did you mean {close[0]}?"
    return 'a flag of the recipes goes into ARGS="--flag value"; `make help` lists the variables.'


def instead(name: str, read: set[str], given: Mapping[str, str]) -> str:
    """Return the fix for a variable that the requested verbs do not read. read: those that they read."""
    if name == "SEQ":
        return 'it is a flag: ARGS="--max_length N".'
    if NEEDS.get(name) in read and "LAUNCHER" in read:  # a verb that starts ranks
        return f"it is read only with {NEEDS[name]}=."
    if given.get("HOSTS") and "HOSTS" in read and name in ("NODES", "NODE_RANK", "LAUNCHER"):
        return "HOSTS= decides it."
    others = sorted(verb for verb in VERBS if name in reads(verb, given))
    if not 0 < len(others) <= LISTED:
        return "leave it out."
    return f"make {', '.join(others)} read{'s' * (len(others) == 1)} it."


def _template(verb: str, given: Mapping[str, str]) -> str:
    """Return what VERBS says of a verb, with the words of the place that the variables name."""
    if verb == "show" and SHOWN & {*given["ZEROFIT_GOALS"].split()}:
        return ""
    text = VERBS[verb].replace("{place}", ON_HOSTS if given.get("HOSTS") else HERE)
    return text.replace("{nodes}", f"NODES:nnodes {OF_NODE}" if given.get("NODES") else "NODES")


def reads(verb: str, given: Mapping[str, str]) -> set[str]:
    """Return the variables that a verb reads beside the given ones."""
    return {*VARIABLE.findall(_template(verb, given))}


def words(verb: str, given: Mapping[str, str]) -> list[str]:
    """Return what the variables add to the command of a verb."""
    if verb == "pipeline" and not given.get("GPUS") and given.get("NODES", "") in ("", "1"):
        given = {**given, "GPUS": "" if given.get("HOSTS") else given.get("PP") or "2"}
    added = []
    for word in _template(verb, given).split():
        name, sign, flag = re.fullmatch(r"([A-Z_]*)(\W?)(.*)", word, re.S).groups()
        value = given.get(name, "")
        if word == "recipes/RECIPE.py":
            recipe = given.get("RECIPE") or "sft"
            added.append(recipe if recipe.endswith(".py") else f"recipes/{recipe}.py")
        elif word.startswith("["):
            added += [word[1:-1]] * ("show" in given["ZEROFIT_GOALS"].split())
        elif not name and not word.startswith("("):
            added.append(word)
        elif not value:
            continue
        elif sign == "+":
            added += shlex.split(value)
        elif sign == "?":
            added += [f"--{name.lower()}"] * (value != "0")
        else:
            added.append(value if sign and not flag else f"--{flag or name.lower()}={value}")
    return added


def check(given: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return what is wrong with the variables of a make line, and those of the environment that its verbs read.

    What is missing is said only where nothing else is wrong: the name may be mistyped.
    """
    asked = [verb for verb in given["ZEROFIT_GOALS"].split() if verb in VERBS]
    read, typed, wrong = {name for verb in asked for name in reads(verb, given)}, given["ZEROFIT_GIVEN"].split(), []
    for name in typed:
        assignment = f"{name}={given[name]}" if name in given else name
        if name not in (*VARIABLES, *OF_MAKE):
            wrong.append(f"{assignment}: no such variable; {suggestion(name)}")
        elif asked and name in VARIABLES and name not in read:
            wrong.append(f"{assignment}: make {' '.join(asked)} does not read it; {instead(name, read, given)}")
    if not wrong:
        needed = {verb: re.findall("[A-Z]+(?==)", REQUIRED[verb]) for verb in asked if verb in REQUIRED}
        wrong = [f"make {verb}: {REQUIRED[verb]}" for verb, names in needed.items() if not all(map(given.get, names))]
        try:
            shlex.split(given.get("ARGS", "") if "ARGS" in read else "")
        except ValueError as error:
            wrong.append(f"ARGS={given['ARGS']}: cannot be split into words: {str(error).lower()}.")
    notes = []
    for name in from_environment({*read, *(("PYTHON", "ENV") if asked else ())}, given):
        shown = name if name == "ARGS" else f"{name}={given[name]}"  # flags may hold a token
        notes.append(f"{shown}: from the environment; `make ... {name}=` sets another value, or none.")
    return wrong, notes


def from_environment(read: set[str], given: Mapping[str, str]) -> list[str]:
    """Return those of some variables that are not on the command line: they may be meant for another program."""
    return [name for name in sorted(read - {*given["ZEROFIT_GIVEN"].split()}) if given.get(name)]


def main() -> None:
    """Check all variables, or become the command of a verb; exit with 2 for what is wrong."""
    if len(sys.argv) == 1:
        wrong, notes = check(os.environ)
        for line in [f"note: {one}" for one in notes] + [f"zerofit: error: {one}" for one in wrong]:
            print("".join(letter if letter.isprintable() else "?" for letter in line), file=sys.stderr)
        raise SystemExit(2 * bool(wrong))
    verb, *command = sys.argv[1:]
    added = words(verb, os.environ)
    os.environ["ZEROFIT_FROM_ENVIRONMENT"] = " ".join(from_environment(reads(verb, os.environ), os.environ))
    if verb == "show" and not added:  # the verb beside it shows its own command
        return
    try:
        os.execvp(command[0], [*command, *added])
    except OSError as error:
        print(f"zerofit: error: {command[0]}: {error.strerror}.", file=sys.stderr)
        raise SystemExit(127) from None


if __name__ == "__main__":
    main()
