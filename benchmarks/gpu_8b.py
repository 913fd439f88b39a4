"""Measure speed and memory of one GPU on Llama-3.1-8B's shape with random weights, beside the planner's figures.

python benchmarks/gpu_8b.py lora                        # about 9 minutes on an H200
python benchmarks/gpu_8b.py full --only 'pure-selective|pure-no-liger'
python benchmarks/gpu_8b.py qlora --out runs/qlora-8b   # saves a base of 16 GB into runs/gpu-8b-files first

Settings run one at a time, each ended after 7 steps, so no model is saved. An optimizer step takes 16 rows of 2,048
tokens, or (mixed) of 200 to 2,048. "as typed" goes through the launcher, whose plan chooses the gradient checkpointing,
as a user's does; on a GPU with less than 130 GiB the others have half of their micro batch. "tok/s" is the median of
the run's own lines without the first three, "tok/s wall" is by the wall clock; "planned tok/s" is what the plan's time
model expects of the same setting, and "off it" how far the median is from that; "held" is what nvidia-smi shows, with
the context and unused blocks. FLOPs a token without attention: LoRA 4 N, all weights 6 N, with full recomputation a
third more; the MFU counts no recomputation.
"""

import os
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

LENGTH, SHORTEST, ROWS, STEPS, WARM_UP = 2048, 200, 16, 7, 3
SECONDS = 150  # for one setting
FILES = ROOT / "runs" / "gpu-8b-files"
COMMON = f"--max_length {LENGTH} --effective_batch_size {ROWS} --max_steps 40 --logging_steps 1 --save_strategy no " \
         "--num_samples 0 --eval_strategy no --learning_rate 1e-5"  # fmt: skip
NOT_EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
DENSE = "--gradient_checkpointing false"
SELECTIVE = "--gradient_checkpointing_policy selective"
PURE = "--pure_bf16 true"
COMPILED = f"{DENSE} --compile_layers true"
HIDDEN = FILES / "hidden"  # a folder of the module path with a FlashAttention 3 that cannot be imported
FLASH_2 = {"PYTHONPATH": os.pathsep.join(filter(None, [str(HIDDEN), str(ROOT / "src"), gpu_job.OUTSIDE]))}
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
        Setting("compile-layers", COMPILED, 4),
        Setting("fp8-compile-layers", f"{COMPILED} --fp8 true", 4),
        Setting("unfused-lora", f"{DENSE} --fused_lora false", 4),
        Setting("flash-2", DENSE, 4, variables=FLASH_2),  # no-checkpointing-micro4 has FlashAttention 3, if it is there
    ],
    "full": [
        full("pure as typed", PURE, typed=True),
        full("pure-default", PURE, 8),
        full("pure-python-adam", f"{PURE} --optim_args compile=false", 8),
        full("pure-selective", f"{PURE} {SELECTIVE}"),
        full("pure-no-checkpointing", f"{PURE} {DENSE}"),
        full("pure-compile-layers", f"{PURE} {COMPILED}"),
        full("pure-fp8-compile-layers", f"{PURE} {COMPILED} --fp8 true"),
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
    """Write the model's shape, the rows and the module that stands before FlashAttention 3."""
    from zerofit.model.attention import FLASH_3

    gpu_job.write_model(FILES / "random", (ROOT / "tests" / "configs" / "llama3.1-8b" / "config.json").read_text())
    gpu_job.write_rows(FILES / "fixed.jsonl", [LENGTH] * 700)
    draw = random.Random(1)
    gpu_job.write_rows(FILES / "mixed.jsonl", [draw.randint(SHORTEST, LENGTH) for _ in range(700)])
    HIDDEN.mkdir(exist_ok=True)
    (HIDDEN / f"{FLASH_3}.py").write_text("raise ImportError('hidden by the benchmark')\n")


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


def predicted(setting: Setting, gpu) -> dict:
    """Ask the planner for the peak in bytes and the tokens per second, or for the reason why it has none."""
    from zerofit.base import command_line
    from zerofit.config import resolve
    from zerofit.plan import candidates, choice, predict
    from zerofit.plan.speed import step

    def resolved(request):
        settings = resolve.resolve(request, 1, gpu)
        resolve.resolve_for_model(settings)
        return settings

    mean = LENGTH if setting.rows == "fixed" else (SHORTEST + LENGTH) / 2
    try:
        flags = command_line.drop(setting.flags(), "--random_init")  # a plan needs the config.json only
        settings = resolved(resolve.resolve_settings(setting.recipe, flags, 1, gpu).request)
        if setting.typed:
            settings = resolved(choice.choose(settings, mean).of(settings.request))
        plan = {"planned_bytes": predict.predict(settings)["peak_bytes"]}
        if settings.padding_free:
            job = candidates.of_settings(settings, gpu)
            tokens = round(mean * job.setting.micro)
            seconds = step.seconds(job.shape, replace(job.setting, tokens=tokens), gpu, round(mean))
            plan["planned_tokens_per_second"] = ROWS * mean / seconds
        return plan
    except Exception as error:  # a plan that fails is a result too
        return {"no_plan": f"no plan: {type(error).__name__}: {error}"[:200]}


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
    expected, median = result.get("planned_tokens_per_second"), result.get("tokens_per_second")
    gib = [size and f"{size / GIB:.2f}" for size in (peak, planned, result.get("held_bytes"))]
    speeds = [speed and f"{speed:,.0f}" for speed in (median, result.get("tokens_per_second_wall"), expected)]
    off = f"{median / expected - 1:+.1%}" if median and expected else None
    return [
        result["setting"], *speeds, off, result.get("mfu") and f"{result['mfu']:.1%}", *gib[:2],
        f"{planned / peak:.3f}" if planned and peak else None, gib[2],
        f"{result['losses'][-1]:.4f}" if result["losses"] else None,
        "; ".join(filter(None, (result.get("failed"), result.get("no_plan")))),
    ]  # fmt: skip


HEAD = (
    "setting, tok/s, tok/s wall, planned tok/s, off it, MFU, peak GiB, planned GiB, planned/peak, held GiB, last loss, "
    "notes"
).split(", ")


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
    with ThreadPoolExecutor(1) as pool:  # planning needs no GPU, and runs beside the next setting
        plans, rows = [], []
        for setting in chosen:
            if time.monotonic() - began < given.budget:
                rows.append(measure(setting, given.out))
                plans.append(pool.submit(predicted, setting, gpu))  # after the proof of the kernels that it counts on
            else:
                rows.append({"setting": setting.name, "losses": [], "failed": "not run: the budget was spent"})
            print(*filter(None, row(rows[-1])), sep="  ", flush=True)
        for result, plan in zip(rows, plans, strict=False):
            result |= plan.result()
    title = f"Llama-3.1-8B's shape on one GPU: {given.kind}"
    gpu_job.save(given.out, "gpu-8b", title, gpu_job.table(HEAD, map(row, rows)), {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
