"""Record what command lines of zerofit do, to prove that a refactoring changes nothing.

    python tests/record.py --output_dir before              # on the old commit; about 12 minutes on two cores
    python tests/record.py --output_dir after               # on the new one
    python tests/record.py --compare before after           # the differences; exit code 1 if there are any
    python tests/record.py --output_dir x --only 'show|refused'

Only public command lines are run, and only what a user can read is recorded, so one copy of this file serves both
commits. One JSON file a command line: what --show prints; of a short real run the values of all arguments with their
sources, the decisions, deepspeed.json, and losses, gradient norms, learning rates and scores in full precision; of a
refusal the exit code and the sentence. Paths, ports, dates, speeds and free memory are left out or replaced.
"""

import argparse
import difflib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# {out} is the folder of all runs of this recording, {name} the run's own. A run may read the folder of one above it.
SHORT = {"--max_steps": "4", "--logging_steps": "1", "--num_samples": "1", "--output_dir": "{out}/{name}"}  # of RUN

SHOWN = {  # --show alone
    "show-multinode": "zerofit launch --gpus 8 --nnodes 2 --node_rank 0 --master_addr h --show recipes/sft.py --zero 3",
    "show-offload": "zerofit sft --gpus 4 --zero 3 --offload all --bf16 true --activation_offload --show",
    "show-preset": "zerofit lora --preset gpu-24g --show",
    "show-long": "zerofit sft --gpus 8 --sp_size 4 --zero 3 --max_length 4096 --packing --show",
    "show-launcher": "zerofit launch --launcher accelerate --gpus 4 --show recipes/dpo.py --adapter lora --beta 0.2",
    "show-recipe": "python recipes/lora.py --lora_r 8 --use_rslora --loraplus_lr_ratio 16 --show",
    "show-lr-scaling": "zerofit sft --effective_batch_size 128 --lr_scaling sqrt --warmup_steps 0.1 --show",
    "show-slurm": "zerofit slurm --nodes 2 --gpus 8 --print recipes/sft.py --zero 3 --output_dir {out}/{name}",
}

RUN = {  # real runs; each is shown with --show before
    "sft-0": "zerofit sft --zero 0",
    "lora-0": "zerofit lora --zero 0",
    "dpo-0": "zerofit dpo --zero 0",
    "sft-1": "zerofit sft --gpus 2 --zero 1",
    "sft-2": "zerofit sft --gpus 2 --zero 2 --save_strategy steps --save_steps 2 --save_total_limit 0",
    "sft-3": "zerofit sft --gpus 2 --zero 3",
    "lora-1": "zerofit lora --gpus 2 --zero 1",
    "lora-2": "zerofit lora --gpus 2 --zero 2 --lora_dropout 0.1",
    "lora-3": "zerofit lora --gpus 2 --zero 3",
    "dpo-1": "zerofit dpo --gpus 2 --zero 1 --adapter lora",
    "dpo-2": "zerofit dpo --gpus 2 --zero 2",
    "dpo-3": "zerofit dpo --gpus 2 --zero 3 --loss_type ipo",
    "kto-2": "zerofit dpo --gpus 2 --zero 2 --loss_type kto",
    "kto-3": "zerofit dpo --gpus 2 --zero 3 --loss_type kto --adapter lora",
    "pipeline": "zerofit pipeline --gpus 2 --num_samples 0",
    "pipeline-accumulation": "zerofit pipeline --gpus 2 --per_device_train_batch_size 8 --num_samples 0",
    "torchrun": "torchrun --nproc_per_node 2 recipes/sft.py --zero 2",
    "accelerate": "accelerate launch --use_deepspeed --num_processes 2 recipes/lora.py --zero 3",
    "accumulation": "zerofit sft --gpus 2 --per_device_train_batch_size 4 --effective_batch_size 16",
    "offload-optimizer": "zerofit sft --gpus 2 --zero 2 --offload optimizer",
    "offload-all": "zerofit lora --gpus 2 --zero 3 --offload all",
    "packing": "zerofit sft --packing --max_length 64",
    "padded": "zerofit sft --padding_free false --gradient_checkpointing false",
    "streaming": "zerofit sft --gpus 2 --streaming --shuffle_buffer_size 100",
    "activations": "zerofit sft --activation_offload --gradient_checkpointing_every 2 --tiled_mlp 2 --fused_loss true",
    "muon": "zerofit sft --gpus 2 --zero 2 --optim muon",
    "adamw-8bit": "zerofit sft --optim adamw_8bit --pure_bf16",
    "sp": "zerofit sft --gpus 2 --sp_size 2 --zero 3",
    "tp": "zerofit sft --gpus 2 --tp_size 2 --zero 1",
    "yaml": "zerofit sft --config examples/my_run.yaml --max_length 128",
    "deepspeed-json": "zerofit sft --gpus 2 --deepspeed deepspeed_configs/zero2.json --eval_steps 2",
    "preset": "zerofit sft --preset gpu-24g --effective_batch_size 8 --bf16 true",
    "resume": "zerofit sft --gpus 2 --zero 2 --resume_from_checkpoint {out}/sft-2/checkpoint-2",
}

REFUSED = {
    "refused-zero": "zerofit sft --zero 5",
    "refused-flag": "zerofit sft --leraning_rate 1",
    "refused-value": "zerofit sft --learning_rate fast",
    "refused-stage-and-ranks": "zerofit sft --gpus 3 --sp_size 2",
    "refused-offload": "zerofit sft --zero 2 --offload all",
    "refused-batch": "zerofit sft --gpus 2 --effective_batch_size 7 --per_device_train_batch_size 4",
    "refused-muon": "zerofit sft --optim muon --pure_bf16",
    "refused-pipeline-zero": "zerofit pipeline --gpus 2 --zero 3",
    "refused-tensor-zero": "zerofit sft --gpus 2 --tp_size 2 --zero 3",
    "refused-lora-flag": "zerofit sft --lora_r 8",
    "refused-streaming": "zerofit sft --streaming",
    "refused-data": "zerofit sft --data no/such.jsonl",
    "refused-model": "zerofit lora --model no/such/model",
    "refused-yaml": "zerofit sft --config no/such.yaml",
    "refused-json": "python recipes/sft.py --deepspeed examples/my_run.yaml",
    "refused-transformers": "python recipes/sft.py --fsdp full_shard",
    "refused-preset": "zerofit sft --preset gpu-1g",
    "refused-recipe": "zerofit launch recipes/no_such.py",
    "refused-verb": "zerofit sfft",
    "refused-resume": "zerofit resume {out}/sft-0",
    "refused-overwrite": "zerofit sft --zero 0 --max_steps 1 --output_dir {out}/sft-1",
}

METRICS = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "epoch")
RESULT = (
    "status", "steps", "steps_not_applied", "train_loss", "tokens", "world_size", "precision", "trainable_parameters",
    "eval_loss", "exact_match_before", "exact_match_after", "certificate",
)  # fmt: skip
VOLATILE = [
    (r"\d{4}-\d\d-\d\d[T_ -]?[\d:.,-]*(?:[+-]\d{4}|Z)?", "DATE"),
    (r"[IWE]\d{4} [\d:.]+ \d+ \S+\]", "LOG"),  # of torch: date, time, process, file
    (r"(?<=port[ =])\d+|(?<=PORT=)\d+|(?<=127\.0\.0\.1:)\d+", "PORT"),
    (r"[\d.,]+ (?:tok/s|seconds\b|[KMGT]i?B (?=(?:are )?free))", "MEASURED"),
    (r"/tmp/[\w./-]+", "TMP"),
    (r"(?<=\S) {2,}", "  "),  # --show pads its columns to the longest path
]  # numbers of JSON stay as they are


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, help="new folder of the recording")
    parser.add_argument("--only", default="", help="regular expression of the command lines' names")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="DIR", help="two recordings")
    args = parser.parse_args()
    if args.compare:
        sys.exit(compare(*args.compare, args.only))
    if not args.output_dir:
        parser.error("--output_dir or --compare is needed")
    record(args.output_dir.resolve(), args.only)


def record(folder: Path, only: str) -> None:
    """Write folder/NAME.json for each command line whose name has `only`; the runs' folders lie in folder/runs."""
    out = folder / "runs"
    out.mkdir(parents=True)
    for name, line in (SHOWN | RUN | REFUSED).items():
        if not re.search(only, name):
            continue
        began, said = time.monotonic(), {"line": line}
        if name in RUN:
            line = " ".join([line, *(f"{flag} {value}" for flag, value in SHORT.items() if flag not in line)])
            said["show"] = execute(f"{line} --show", name, out)
        outcome = execute(line, name, out)
        if name in RUN:
            said |= {"code": outcome["code"], "run": run_facts(out / name, out)}
            if outcome["code"]:
                said["stderr"] = outcome["stderr"]
        else:
            said |= outcome
        (folder / f"{name}.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
        print(f"{name}: exit code {outcome['code']}, {time.monotonic() - began:.0f} s", flush=True)


def execute(line: str, name: str, out: Path) -> dict:
    """Run a command line from the repository's root; return its exit code and the lines of stdout and stderr."""
    python = {
        "zerofit": [sys.executable, "-m", "zerofit"],
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "accelerate": [sys.executable, "-m", "accelerate.commands.accelerate_cli"],
    }
    program, *words = line.format(out=out, name=name).split()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*python[program], *words], cwd=ROOT, env=environment, capture_output=True, text=True)
    return {
        "code": done.returncode,
        "stdout": [without_paths(row, out) for row in done.stdout.splitlines()],
        "stderr": [without_paths(row, out) for row in done.stderr.splitlines()],
    }


def run_facts(folder: Path, out: Path) -> dict:
    """Return what a run left in its folder that must not change; a file that is missing is null."""

    def read(name: str) -> dict:
        return json.loads(without_paths(file.read_text(), out)) if (file := folder / name).exists() else {}

    job = {**read("job.json"), **read("run.json")}  # one of them has the arguments
    metrics = folder / "metrics.jsonl"
    steps = [json.loads(row) for row in metrics.read_text().splitlines()] if metrics.exists() else []
    result = read("result.json")
    return {
        "arguments": job.get("arguments"),
        "decisions": job.get("decisions"),
        "deepspeed.json": read("deepspeed.json"),
        "metrics": [{key: step[key] for key in METRICS if key in step} for step in steps],
        "result": {key: result.get(key) for key in RESULT},
    }


def without_paths(text: str, out: Path) -> str:
    """Return text with the folder of the recording, the interpreter and the checkout replaced by their names."""
    for path, word in ((out, "OUT"), (sys.executable, "PYTHON"), (sys.prefix, "ENVIRONMENT"), (ROOT, "CHECKOUT")):
        text = text.replace(str(path), word)
    return text


def compare(before: Path, after: Path, only: str) -> int:
    """Print the differences of two recordings; return 1 if there are any."""
    names = {file.name for folder in (before, after) for file in folder.glob("*.json") if re.search(only, file.stem)}
    different = 0
    for name in sorted(names):
        texts = [comparable(folder / name) for folder in (before, after)]
        difference = [*difflib.unified_diff(*texts, f"{before}/{name}", f"{after}/{name}", n=2, lineterm="")]
        print(*difference, sep="\n", end="\n" if difference else "")
        different += bool(difference)
    print(f"{len(names)} command lines, {different} differ")
    return int(bool(different))


def comparable(file: Path) -> list[str]:
    """Return the lines of a recorded file with the volatile text replaced; of a missing file none."""
    text = file.read_text() if file.exists() else ""
    for pattern, word in VOLATILE:
        text = re.sub(pattern, word, text)
    return text.splitlines()


if __name__ == "__main__":
    main()
