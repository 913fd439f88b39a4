"""Measure speed and memory of one GPU on Llama-3.1-8B's shape with random weights, beside the planner's peak.

python benchmarks/gpu_8b.py lora                        # about 9 minutes on an H200
python benchmarks/gpu_8b.py full --only 'pure-selective|pure-no-liger'
python benchmarks/gpu_8b.py qlora --out runs/qlora-8b   # saves a base of 16 GB into runs/gpu-8b-files first

Settings run one at a time, each ended after 7 steps, so no model is saved. An optimizer step takes 16 rows of 2,048
tokens, or (mixed) of 200 to 2,048. "as typed" goes through the launcher, whose plan chooses the gradient checkpointing,
as a user's does; on a GPU with less than 130 GiB the others have half of their micro batch. "tok/s" is the median of
the run's own lines without the first three, "tok/s wall" is by the wall clock; "held" is what nvidia-smi shows, with
the context and unused blocks. FLOPs a token without attention: LoRA 4 N, all weights 6 N, with full recomputation a
third more; the MFU counts no recomputation.
"""

import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import gpu_job
from gpu_job import GIB
from machine import ROOT

LENGTH, ROWS, STEPS, WARM_UP = 2048, 16, 7, 3
SECONDS = 150  # for one setting
FILES = ROOT / "runs" / "gpu-8b-files"
COMMON = f"--max_length {LENGTH} --effective_batch_size {ROWS} --max_steps 40 --logging_steps 1 --save_strategy no " \
         "--num_samples 0 --eval_strategy no --learning_rate 1e-5"  # fmt: skip
NOT_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
DENSE = "--gradient_checkpointing false"
SELECTIVE = "--gradient_checkpointing_policy selective"
PURE = "--pure_bf16 true"
STREAMS = "--activation_offload true --activation_offload_streams true"


@dataclass(frozen=True)
class Setting:
    """One run. rows: "fixed" or "mixed" lengths; base: "random" weights, or "saved", which can be quantized."""

    name: str
    extra: str = ""
    micro_batch: int = 8
    recipe: str = "lora"
    rows: str = "fixed"
    base: str = "random"
    package: str = ""
    variables: dict = field(default_factory=dict)
    typed: bool = False  # through the launcher, with what it chooses

    def flags(self) -> list[str]:
        model = f"{shlex.quote(str(FILES / self.base))}{' --random_init true' if self.base == 'random' else ''}"
        rows = shlex.quote(str(FILES / f"{self.rows}.jsonl"))
        micro = "" if self.typed else f"--per_device_train_batch_size {self.micro_batch}"
        return shlex.split(f"--model {model} --data {rows} {COMMON} {micro} {self.extra}")

    def on(self, gpu) -> "Setting":
        """Return the setting as this GPU can run it."""
        small = gpu.memory_gib < 130 and not self.typed
        return replace(self, micro_batch=max(1, self.micro_batch // 2)) if small else self


def full(name: str, extra: str, micro_batch: int = 4, **more) -> Setting:
    return Setting(name, extra, micro_batch, "sft", **more)


def qlora(name: str, extra: str) -> Setting:
    return Setting(name, extra, 4, base="saved", package="bitsandbytes")


KINDS = {
    "lora": [
        Setting("as typed", typed=True),
        Setting("default"),
        Setting("selective", SELECTIVE),
        Setting("no-checkpointing", DENSE),
        Setting("no-checkpointing-micro4", DENSE, 4),
        Setting("no-liger", f"{DENSE} --use_liger_kernel false"),
        Setting("zero1-bf16-adapters", f"--zero 1 {DENSE}", 4),
        Setting("mixed", DENSE, rows="mixed"),
        Setting("no-expandable", DENSE, rows="mixed", variables=NOT_EXPANDABLE),
        Setting("no-workers", f"{DENSE} --dataloader_num_workers 0", rows="mixed"),
        Setting("mixed-padded", f"{DENSE} --padding_free false", rows="mixed"),
        Setting("compile", f"{DENSE} --torch_compile true", 4),
    ],
    "full": [
        full("pure as typed", PURE, typed=True),
        full("pure-default", PURE, 8),
        full("pure-python-adam", f"{PURE} --optim_args compile=false", 8),
        full("pure-selective", f"{PURE} {SELECTIVE}"),
        full("pure-no-checkpointing", f"{PURE} {DENSE}"),
        full("pure-no-liger", f"{PURE} {SELECTIVE} --use_liger_kernel false"),
        full("pure-8bit-adam", f"{PURE} {SELECTIVE} --optim adamw_8bit", package="bitsandbytes"),
        full("zero1-8bit-adam", "--zero 1 --optim adamw_8bit", package="bitsandbytes"),
        full("zero2-sgd", "--zero 2 --optim sgd"),
        full("pure-activation-offload", f"{PURE} --activation_offload true", 8),
        full("pure-activation-offload-streams", f"{PURE} {STREAMS}", 8),
    ],
    "qlora": [
        qlora("z0", "--zero 0 --load_in_4bit true"),
        qlora("z3", "--zero 3 --load_in_4bit true"),
        qlora("no-checkpointing", f"--load_in_4bit true {DENSE}"),
        qlora("z2", "--zero 2 --load_in_4bit true"),
        qlora("8bit-base", "--load_in_8bit true"),
        qlora("z1", "--zero 1 --load_in_4bit true"),
    ],
}


def write_files() -> None:
    """Write the model's shape and the rows."""
    gpu_job.write_model(FILES / "random", (ROOT / "tests" / "configs" / "llama3.1-8b" / "config.json").read_text())
    gpu_job.write_rows(FILES / "fixed.jsonl", [LENGTH] * 700)
    draw = random.Random(1)
    gpu_job.write_rows(FILES / "mixed.jsonl", [draw.randint(200, LENGTH) for _ in range(700)])


def save_base() -> None:
    """Save the model with random weights: a base is quantized while it is loaded from a disk."""
    code = (
        "import sys, torch; from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer\n"
        "config = AutoConfig.from_pretrained(sys.argv[1])\n"
        "with torch.device('cuda'):\n    net = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)\n"
        "net.save_pretrained(sys.argv[2], max_shard_size='2GB')\n"
        "AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
    )
    if not (FILES / "saved" / "tokenizer.json").exists():
        subprocess.run([sys.executable, "-c", code, str(FILES / "random"), str(FILES / "saved")], check=True)


def predicted_peak(setting: Setting, gpu) -> int | str:
    """Ask the planner for the peak in bytes, or return why it has none."""
    from zerofit.base import command_line
    from zerofit.config import resolve
    from zerofit.plan import predict

    try:
        flags = command_line.drop(setting.flags(), "--random_init")  # a plan needs the config.json only
        return predict.predict(resolve.resolve_settings(setting.recipe, flags, 1, gpu))["peak_bytes"]
    except Exception as error:  # a plan that fails is a result too
        return f"no plan: {type(error).__name__}: {error}"[:200]


def measure(setting: Setting, out: Path) -> dict:
    """Run one setting to its last step, and sample what the GPU holds about every second."""
    folder, times, held, sampled = out / setting.name, [], 0, 0.0
    command = gpu_job.launch_command if setting.typed else gpu_job.recipe_command
    planned = {} if setting.typed else {"ZEROFIT_PLAN": "0"}
    job = gpu_job.Job(command(setting.recipe, setting.flags(), folder), folder, planned | setting.variables)
    while len(times) < STEPS and job.seconds < SECONDS and job.process.poll() is None:
        times += [time.monotonic()] * (len(job.steps()) - len(times))
        if time.monotonic() - sampled > 1:
            held, sampled = max(held, gpu_job.used_bytes()), time.monotonic()
        time.sleep(0.05)
    job.kill()
    steps = job.steps()[:STEPS]
    result = {"setting": setting.name, "held_bytes": held, "losses": [step["loss"] for step in steps]}
    if len(steps) < STEPS:
        errors = [line for line in job.output.splitlines() if "Error" in line or line.startswith("zerofit: ")]
        return result | {"failed": (errors or [f"{len(steps)} steps in {job.seconds:.0f} s"])[-1][:200]}
    steady = steps[WARM_UP:]
    result["tokens_per_second"] = statistics.median(step["tokens_per_second"] for step in steady)
    result["mfu"] = statistics.median(step.get("mfu", 0) for step in steady) or None
    result["peak_bytes"] = steady[-1]["peak_memory_bytes"]
    if setting.rows == "fixed":
        result["tokens_per_second_wall"] = LENGTH * ROWS * (len(times) - WARM_UP - 1) / (times[-1] - times[WARM_UP])
    return result


def row(result: dict) -> list:
    """Format one line of the table; unknown values stay empty."""
    planned, peak = result.get("planned_bytes"), result.get("peak_bytes")
    why_no_plan = planned if isinstance(planned, str) else None
    planned = None if why_no_plan else planned
    gib = [size and f"{size / GIB:.2f}" for size in (peak, planned, result.get("held_bytes"))]
    speeds = [result.get(name) and f"{result[name]:,.0f}" for name in ("tokens_per_second", "tokens_per_second_wall")]
    return [
        result["setting"], *speeds, result.get("mfu") and f"{result['mfu']:.1%}", *gib[:2],
        f"{planned / peak:.3f}" if planned and peak else None, gib[2],
        f"{result['losses'][-1]:.4f}" if result["losses"] else None,
        "; ".join(filter(None, (result.get("failed"), why_no_plan))),
    ]  # fmt: skip


HEAD = "setting, tok/s, tok/s wall, MFU, peak GiB, planned GiB, planned/peak, held GiB, last loss, notes".split(", ")


def main() -> None:
    parser = gpu_job.parser(__doc__, "gpu-8b", budget_seconds=540)
    parser.add_argument("kind", choices=KINDS)
    given = parser.parse_args()
    from zerofit.base import hardware

    facts, began, gpu = gpu_job.facts(), time.monotonic(), hardware.find("detect")
    write_files()
    if given.kind == "qlora":
        save_base()
    chosen = [setting.on(gpu) for setting in KINDS[given.kind] if re.search(given.only, setting.name)]
    with ThreadPoolExecutor(1) as pool:  # planning needs no GPU, and runs in parallel
        plans = [pool.submit(predicted_peak, setting, gpu) for setting in chosen]
        rows = []
        for setting, plan in zip(chosen, plans, strict=True):
            if time.monotonic() - began < given.budget:
                rows.append(measure(setting, given.out))
            else:
                rows.append({"setting": setting.name, "losses": [], "failed": "not run: the budget was spent"})
                plan.cancel()
            print(*filter(None, row(rows[-1])), sep="  ", flush=True)
        for result, plan in zip(rows, plans, strict=True):
            result["planned_bytes"] = None if plan.cancelled() else plan.result()
    title = f"Llama-3.1-8B's shape on one GPU: {given.kind}"
    gpu_job.save(given.out, "gpu-8b", title, gpu_job.table(HEAD, map(row, rows)), {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
