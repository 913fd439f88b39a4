"""Reject make variables that are not read, name those of the environment, and split ARGS into words.

Standard library only: it runs before the installation.
"""

import difflib
import os
import shlex
import sys

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

SHOWN = 8  # most verbs that a message lists; a variable that more of them read belongs to training


def suggestion(name: str, known: list[str]) -> str:
    """Return what to write instead of an unknown variable."""
    normalized = name.upper().replace("-", "_")
    if flag := next((flag for flag, others in FLAGS.items() if normalized in others.split()), None):
        return f'it is a flag: ARGS="{flag}".'
    synonym = next((variable for variable, others in SYNONYMS.items() if normalized in others.split()), None)
    close = [synonym] if synonym else difflib.get_close_matches(normalized, known, 1, 0.75)
    if close:
        return f"did you mean {close[0]}?"
    return 'a flag of the recipes goes into ARGS="--flag value"; `make help` lists the variables.'


def instead(name: str, asked: list[str], readers: list[tuple[str, str]]) -> str:
    """Return the fix for a variable that the requested verbs do not read. readers: (verb, variable that it reads)."""
    read = {variable for verb, variable in readers if verb in asked}
    if name == "SEQ":
        return 'it is a flag: ARGS="--max_length N".'
    if NEEDS.get(name) in read and "LAUNCHER" in read:  # a verb that starts ranks
        return f"it is read only with {NEEDS[name]}=."
    if os.environ.get("HOSTS") and "HOSTS" in read and name in ("NODES", "NODE_RANK", "LAUNCHER"):
        return "HOSTS= decides it."
    others = sorted(verb for verb, variable in readers if variable == name)
    if not 0 < len(others) <= SHOWN:
        return "leave it out."
    return f"make {', '.join(others)} read{'s' * (len(others) == 1)} it."


def refuse() -> None:
    """Print a line for each refused name and exit with 2; the Makefile passes the names in the environment."""
    known = [*os.environ["VARIABLES"].split(), "PYTHON", "ENV"]
    asked = os.environ["ASKED"].split()
    readers = [tuple(pair.split(":")) for pair in os.environ["READ_BY"].split()]
    problems = {}
    for name in os.environ["UNKNOWN_VARIABLES"].split():
        problems[name] = f"no such variable; {suggestion(name, known)}"
    for name in os.environ["UNREAD_VARIABLES"].split():
        problems[name] = f"make {' '.join(asked)} does not read it; {instead(name, asked, readers)}"
    for name, problem in sorted(problems.items()):
        value = os.environ.get(name)  # make exports names of letters, digits and underscores only
        assignment = name if value is None else f"{name}={value}"
        print(f"zerofit: error: {assignment}: {problem}", file=sys.stderr)
    raise SystemExit(2)


def name_of_environment(names: list[str]) -> None:
    """Print a line for each variable that make takes from the environment: it may be meant for another program."""
    for name in names:
        if value := os.environ.get(name):
            shown = name if name == "ARGS" else f"{name}={value}"  # flags may hold a token
            line = f"note: {shown}: from the environment; `make ... {name}=` sets another value, or none."
            print("".join(letter if letter.isprintable() else "?" for letter in line), file=sys.stderr, flush=True)


def run_with(args: str, command: list[str]) -> None:
    """Become the command, with the words of ARGS at its end. Exit with 2 for an unclosed quote."""
    try:
        words = shlex.split(args)
    except ValueError as error:
        print(f"zerofit: error: ARGS={args}: cannot be split into words: {str(error).lower()}.", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        os.execvp(command[0], [*command, *words])
    except OSError as error:
        print(f"zerofit: error: {command[0]}: {error.strerror}.", file=sys.stderr)
        raise SystemExit(127) from None


def main() -> None:
    """Do what the Makefile asks for; see the functions."""
    match sys.argv[1:]:
        case []:
            refuse()
        case ["--environment", *names]:
            name_of_environment(names)
        case [args, *command]:
            run_with(args.removeprefix("--args="), command)


if __name__ == "__main__":
    main()
