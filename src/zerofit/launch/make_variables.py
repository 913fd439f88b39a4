"""Check the variables of a make command, and convert them to command-line flags.

The Makefile first runs this file without arguments, then for each verb as `make_variables.py VERB COMMAND ...`. It runs
before the installation, with the standard library only.
"""

import difflib
import os
import re
import shlex
import sys
from collections.abc import Mapping

# {verb: words added to its command}. A name in capitals is a variable that the verb reads. If it has a value, ZERO
# becomes --zero=VALUE, SP:sp_size becomes --sp_size=VALUE, RUN: the value itself, MERGE? becomes --merge (not for 0),
# ARGS+ the words of the value, and recipes/RECIPE.py the file of a recipe. The Makefile itself reads (EXTRAS).
# `make show` adds [--show]. {place} and {nodes} depend on HOSTS and NODES: see _template.
SETTINGS = "ZERO OFFLOAD SP:sp_size TP:tp_size PP:pp_size MODEL DATA CONFIG OUT:output_dir"
LAUNCH = "{place} PORT ARGS [--show]"
HOSTS_LAUNCH = "hosts HOSTS INCLUDE EXCLUDE GPUS MASTER_ADDR JOIN_TIMEOUT INTERFACE"
LOCAL_LAUNCH = "launch HOSTS GPUS LAUNCHER {nodes}"
NODE_VARIABLES = "NODE_RANK MASTER_ADDR JOIN_TIMEOUT INTERFACE"
VERBS = {
    **{name: f"{LAUNCH} recipes/{name}.py {SETTINGS}" for name in ("sft", "lora", "dpo", "pipeline")},
    **dict.fromkeys(["launch", "show"], f"{LAUNCH} recipes/RECIPE.py {SETTINGS}"),
    "resume": "resume LAUNCHER PORT GPUS RECIPE ARGS {nodes} RUN: ZERO OFFLOAD SP:sp_size TP:tp_size PP:pp_size",
    "convert": "convert OUT:output FILE: ARGS+",
    "export": "export MERGE? DTYPE FOR LLAMA_CPP OUT:output_dir RUN: ARGS+",
    "chat": "chat RUN: ARGS+",
    "eval": "eval RUN: TASKS GPUS ARGS+",
    "report": "report RUN: ARGS+",
    "watch": "watch RUN: ARGS+",
    "slurm": "slurm NODES GPUS SBATCH SWEEP SETUP IMAGE JOIN_TIMEOUT INTERFACE PORT ARGS [--print] "
    f"recipes/RECIPE.py {SETTINGS}",
    "status": "status RUN:",
    "cancel": "cancel RUN: ARGS+",
    "doctor": "doctor GPUS PORT OUT:output_dir NODES ARGS+",
    "plan": f"plan RECIPE GPUS ARGS NODES GPU_TYPE METHOD HOST_MEMORY {SETTINGS}",
    "batch-size": f"batch-size RECIPE GPUS ARGS {SETTINGS}",
    "data": "data RECIPE ARGS MODEL DATA CONFIG OUT:output_dir [--show]",
    "calibrate": "calibrate",
    "reproduce": "GPUS OUT:output_dir RECIPE: ARGS+",
    "install": "(EXTRAS)",
    "ledger": "MODEL GPUS SEQ ARGS+",
    "image": "(IMAGE)",
    "image-cpu": "(IMAGE) ARGS+",
    **dict.fromkeys("plan-validate reliability test-versions models bench-peers everything".split(), "ARGS+"),
    **dict.fromkeys("gpu-first lint test test-gpu test-cluster test-all docs-serve examples clean".split(), ""),
    **dict.fromkeys("wheelhouse sbom audit site".split(), ""),
}

# {verb: message if a variable that the message mentions is missing}
REQUIRED = {
    **dict.fromkeys(["resume", "watch", "status", "cancel"], "set RUN=runs/... to the run folder"),
    "convert": "set FILE=... to the YAML file",
    "export": "set RUN=runs/... to the run to export",
    "chat": "set RUN=runs/... to the run to chat with",
    "eval": "set RUN=runs/... and TASKS=... to the names or folders of tasks",
    "report": 'set RUN="runs/..." to the run folders',
    "reproduce": "set RECIPE=... to a folder of examples/reproduce",
}

SHOWABLE = {"sft", "lora", "dpo", "pipeline", "launch", "data", "slurm"}  # `make show lora` prints the command

VARIABLE = re.compile(r"[A-Z][A-Z_]+")
VARIABLES = sorted({*VARIABLE.findall(" ".join([*VERBS.values(), HOSTS_LAUNCH, LOCAL_LAUNCH, NODE_VARIABLES]))})

# Other variables of the Makefile and of make itself.
MAKE_VARIABLES = """PYTHON ENV PY PIP PREFIX STAMP DEV_STAMP PEERS_STAMP SHELL .SHELLFLAGS MAKE MAKEFLAGS MFLAGS
MAKEFILES MAKESHELL VPATH CURDIR PATH""".split()

# What make passes to a program, which a make of the program's own would take for the user's.
EXPORTED = [
    *"MAKELEVEL MAKEFLAGS MFLAGS MAKEOVERRIDES ZEROFIT_GOALS ZEROFIT_GIVEN ZEROFIT_FROM_ENVIRONMENT".split(),
    *VARIABLES,
]

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

# {flag: make variables that users may try for it}
FLAGS = {
    "--effective_batch_size N": "BATCH BATCH_SIZE BS",
    "--learning_rate N": "LR LEARNING_RATE",
    "--num_train_epochs N": "EPOCHS NUM_EPOCHS NUM_TRAIN_EPOCHS",
    "--max_steps N": "STEPS MAX_STEPS",
    "--max_length N": "MAX_LENGTH MAX_LEN MAX_SEQ_LENGTH CUTOFF_LEN",
    "--lora_r N": "LORA_R LORA_RANK",
    "--seed N": "SEED",
}

# {variable: the variable that it requires}
NEEDS = {
    "INCLUDE": "HOSTS",
    "EXCLUDE": "HOSTS",
    "NODE_RANK": "NODES",
    "MASTER_ADDR": "NODES",
    "JOIN_TIMEOUT": "NODES",
    "INTERFACE": "NODES",
}

MAX_LISTED_VERBS = 8  # in a message; a variable that more verbs read belongs to training


def suggestion(name: str) -> str:
    """Return the replacement for an unknown variable."""
    normalized = name.upper().replace("-", "_")
    if flag := next((flag for flag, others in FLAGS.items() if normalized in others.split()), None):
        return f'use the flag: ARGS="{flag}".'
    synonym = next((variable for variable, others in SYNONYMS.items() if normalized in others.split()), None)
    close = [synonym] if synonym else difflib.get_close_matches(normalized, [*VARIABLES, "PYTHON", "ENV"], 1, 0.75)
    if close:
        return f"did you mean {close[0]}?"
    return 'pass flags of the recipes as ARGS="--flag value"; `make help` lists the variables.'


def fix_for_unread(name: str, read: set[str], env: Mapping[str, str]) -> str:
    """Return the fix for a variable that the verbs do not read. read: variables that they read."""
    if name == "SEQ":
        return 'use the flag: ARGS="--max_length N".'
    if NEEDS.get(name) in read and "LAUNCHER" in read:  # a verb that starts ranks
        return f"it requires {NEEDS[name]}=."
    if env.get("HOSTS") and "HOSTS" in read and name in ("NODES", "NODE_RANK", "LAUNCHER"):
        return "HOSTS= determines it."
    others = sorted(verb for verb in VERBS if name in reads(verb, env))
    if not 0 < len(others) <= MAX_LISTED_VERBS:
        return "remove it."
    return f"it works with make {', '.join(others)}."


def _template(verb: str, env: Mapping[str, str]) -> str:
    """Return the VERBS entry of a verb with {place} and {nodes} filled in."""
    if verb == "show" and SHOWABLE & {*env["ZEROFIT_GOALS"].split()}:
        return ""
    text = VERBS[verb].replace("{place}", HOSTS_LAUNCH if env.get("HOSTS") else LOCAL_LAUNCH)
    return text.replace("{nodes}", f"NODES:nnodes {NODE_VARIABLES}" if env.get("NODES") else "NODES")


def reads(verb: str, env: Mapping[str, str]) -> set[str]:
    """Return the variables that a verb reads."""
    return {*VARIABLE.findall(_template(verb, env))}


def words(verb: str, env: Mapping[str, str]) -> list[str]:
    """Return the words that the variables add to the command of a verb."""
    if verb == "pipeline" and not env.get("GPUS") and env.get("NODES", "") in ("", "1"):
        env = {**env, "GPUS": "" if env.get("HOSTS") else env.get("PP") or "2"}
    added = []
    for word in _template(verb, env).split():
        name, sign, flag = re.fullmatch(r"([A-Z_]*)(\W?)(.*)", word, re.S).groups()
        value = env.get(name, "")
        if word == "recipes/RECIPE.py":
            recipe = env.get("RECIPE") or "sft"
            added.append(recipe if recipe.endswith(".py") else f"recipes/{recipe}.py")
        elif word.startswith("["):
            added += [word[1:-1]] * ("show" in env["ZEROFIT_GOALS"].split())
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


def check(env: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return (errors in the variables of a make command, notes on variables from the environment).

    Missing variables are reported only without other errors, since a name may be mistyped.
    """
    verbs = [verb for verb in env["ZEROFIT_GOALS"].split() if verb in VERBS]
    read, typed, errors = {name for verb in verbs for name in reads(verb, env)}, env["ZEROFIT_GIVEN"].split(), []
    for name in typed:
        assignment = f"{name}={env[name]}" if name in env else name
        if name not in (*VARIABLES, *MAKE_VARIABLES):
            errors.append(f"{assignment}: no such variable; {suggestion(name)}")
        elif verbs and name in VARIABLES and name not in read:
            errors.append(f"{assignment}: make {' '.join(verbs)} does not read it; {fix_for_unread(name, read, env)}")
    if not errors:
        required = {verb: re.findall("[A-Z]+(?==)", REQUIRED[verb]) for verb in verbs if verb in REQUIRED}
        errors = [f"make {verb}: {REQUIRED[verb]}" for verb, names in required.items() if not all(map(env.get, names))]
        try:
            shlex.split(env.get("ARGS", "") if "ARGS" in read else "")
        except ValueError as error:
            errors.append(f"ARGS={env['ARGS']}: cannot be split into words: {str(error).lower()}.")
    notes = []
    for name in from_environment({*read, *(("PYTHON", "ENV") if verbs else ())}, env):
        shown = name if name == "ARGS" else f"{name}={env[name]}"  # flags may hold a token
        notes.append(f"{shown}: set in the environment; override or clear it with `make ... {name}=`.")
    return errors, notes


def from_environment(read: set[str], env: Mapping[str, str]) -> list[str]:
    """Return the variables that are set in the environment only; they may be intended for another program."""
    return [name for name in sorted(read - {*env["ZEROFIT_GIVEN"].split()}) if env.get(name)]


def main() -> None:
    """Check all variables (exit code 2 for errors), or execute the command of a verb."""
    if len(sys.argv) == 1:
        errors, notes = check(os.environ)
        for line in [f"note: {note}" for note in notes] + [f"zerofit: error: {error}" for error in errors]:
            print("".join(letter if letter.isprintable() else "?" for letter in line), file=sys.stderr)
        raise SystemExit(2 * bool(errors))
    verb, *command = sys.argv[1:]
    added = words(verb, os.environ)
    os.environ["ZEROFIT_FROM_ENVIRONMENT"] = " ".join(from_environment(reads(verb, os.environ), os.environ))
    if verb == "show" and not added:  # the other verb prints its command
        return
    try:
        os.execvp(command[0], [*command, *added])
    except OSError as error:
        print(f"zerofit: error: {command[0]}: {error.strerror}.", file=sys.stderr)
        raise SystemExit(127) from None


if __name__ == "__main__":
    main()
