"""Run the stages of first.sh and second.sh, write their results to $OUT/GROUP.md, and end after BUDGET seconds.

stages.py first | speed | settings8b | kernels | fix [--only REGEX] [--check]
"""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import gpu_job
from gpu_job import GIB, Job, launch_command, recipe_command
from machine import ROOT

CHECK, GROUP = "--check" in sys.argv, sys.argv[1] if __name__ == "__main__" else ""
BEGAN, BUDGET = float(os.environ.get("BEGAN", time.time())), float(os.environ.get("BUDGET", 480))
OUT, RUNS = Path(os.environ.get("OUT", ROOT / ".runs" / "out")).resolve(), ROOT / ".runs" / "gpu"
FILES, STATE, LOSSES = RUNS / "files", RUNS / "state.json", RUNS / "losses.json"  # the second call continues from them
PATH = os.pathsep.join(filter(None, [str(ROOT / "src"), gpu_job.OUTSIDE]))
STEPS, WARM = (4, 1) if CHECK else (7, 3)  # logged steps of a timed run, and uncounted first steps; one is profiled
LONG, ROWS = (64, 4) if CHECK else (2048, 16)  # tokens per row, rows per optimizer step
LINES, JOBS, STAGE = [], [], ""
PACKAGES = (
    "torch triton transformers accelerate deepspeed peft datasets bitsandbytes liger-kernel torchao huggingface_hub "
    "numpy"
).split()

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}  # 0.2B
if CHECK:
    SIZES = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 512,
    }
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
} | SIZES
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 512,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
} | SIZES
# Lines about self-tests and fallbacks at the start of a run, and the lines among them that report a fallback.
START_LINES = (
    r"^\s*-? *((?:use_liger_kernel|expandable_segments|padding_free|"
    r"experts_implementation|fused_lora|"
    r"attention by|Liger|flex|(?:holds|FAILS|not checked) +(?:documents in one row|loss)|dataloader_num_workers|"
    r"note: (?!packages|HF_HUB)|plan: .*without).*)"
)
FALLBACKS = (
    r"(use_liger_kernel|expandable_segments|padding_free) [Ff]alse|^note: |falls back|FAILS|"
    r"not checked|: eager|plan: "
)


# --- lines, time, processes ---


def left() -> float:
    return BUDGET - (time.time() - BEGAN)


def report(name: str, good, text: str) -> None:
    state = "ok" if good is True else "WRONG" if good is False else good
    LINES.append((round(time.time() - BEGAN), STAGE, state, name, re.sub(r"\s+", " ", text)))
    print(f"{LINES[-1][0]:4} s  {state:<5} {name}: {LINES[-1][4][: 260 if state == 'note' else 520]}", flush=True)


def write() -> None:
    rows = [f"| {s} | {state} | {name} | {text.replace('|', '/')} |" for s, _, state, name, text in LINES]
    head = [f"# {GROUP}, {time.strftime('%Y-%m-%d %H:%M')}", "", "| s | | what | result |", "|---|---|---|---|"]
    (OUT / f"{GROUP}.md").write_text("\n".join([*head, *rows]) + "\n")
    logs = "".join(
        f"\n\n=== {log.stem}\n{log.read_text(errors='replace')[-9000:]}" for log in sorted(RUNS.glob("*.log"))
    )
    (OUT / f"{GROUP}.log").write_text(logs[-12_000_000:])
    known = json.loads(STATE.read_text()) if STATE.exists() else {}
    known |= {stage: all(state in ("ok", "note") for _, s, state, *_ in LINES if s == stage) for _, stage, *_ in LINES}
    STATE.write_text(json.dumps(known))


def start(words: list[str], name: str, **variables: str) -> Job:
    shutil.rmtree(RUNS / name, ignore_errors=True)  # from an earlier call
    JOBS.append(Job(words, RUNS / name, variables))
    return JOBS[-1]


def stop_all() -> None:
    for job in JOBS:
        if job.process.poll() is None:
            job.kill()


def error(job: Job) -> str:
    lines = [
        x
        for x in job.output.splitlines()
        if re.match(r"(\[rank\d\]: )?(\w+\.)*\w*(Error|Exception)\b|zerofit: error|E  ", x)
    ]
    return (lines or job.output.splitlines() or ["no output"])[-1][:300]


def self_tests(job: Job) -> str:
    lines = dict.fromkeys(m[1].strip()[:150] for line in job.output.splitlines() if (m := re.match(START_LINES, line)))
    bad = [line for line in lines if re.search(FALLBACKS, line)]
    return "; ".join([*(f"FELL BACK: {line}" for line in bad), *(line for line in lines if line not in bad)])


def run_parallel(cases: dict, seconds: float) -> dict:
    """Run cases in parallel; return {name: (job, exit code or None after a timeout)}.

    Args: cases: {name: (words, variables, the case whose run folder it needs, or "")}.
    """
    end, waiting, running, done = time.time() + seconds, dict(cases), {}, {}
    while (waiting or running) and time.time() < end:
        for name, (words, variables, after) in list(waiting.items()):
            if len(running) < (2 if CHECK else 12) and (not after or after in done):
                running[name] = start(words, name, **variables)
                del waiting[name]
        for name, job in list(running.items()):
            if job.process.poll() is not None:
                done[name] = (running.pop(name), job.process.returncode)
        time.sleep(0.05)
    return done | {name: (job, job.kill()) for name, job in running.items()}


def child(name: str, seconds: float) -> None:
    """Run a function of this file in a separate process, and report the lines that it returns."""
    check = ["--check"] * (CHECK and name != "flags")
    job = start([sys.executable, __file__, "child", name, *check], name, PYTHONPATH=PATH)
    job.finish(seconds)
    result = re.findall(r"^RESULT (.*)$", job.output, re.M)
    for line in json.loads(result[-1]) if result else [(name, False, error(job))]:
        report(*line)


# --- (a) the machine ---


def write_files() -> None:
    """Write the model configurations and the rows."""
    gpu_job.write_model(
        FILES / "8b", json.dumps(SMALL) if CHECK else (ROOT / "tests/configs/llama3.1-8b/config.json").read_text()
    )
    gpu_job.write_model(FILES / "mixture", json.dumps(MIXTURE))
    gpu_job.write_rows(FILES / "rows.jsonl", [LONG] * 20 * ROWS)
    draw = random.Random(1)
    gpu_job.write_rows(FILES / "mixed.jsonl", [draw.randint(LONG // 10, LONG) for _ in range(20 * ROWS)])
    gpu_job.write_rows(FILES / "short.jsonl", [LONG // 8] * 160 * ROWS)  # 16 rows fill a pack of 2 LONG
    gpu_job.write_model(FILES / "small", json.dumps(SMALL))


def child_machine() -> list:
    import importlib
    from importlib import metadata

    write_files()
    began, failed, versions = time.time(), [], []
    for name in (
        "torch",
        "transformers.trainer",
        "deepspeed",
        "peft",
        "datasets",
        "bitsandbytes",
        "liger_kernel.transformers",
        "torchao",
        "zerofit.recipe",
        "zerofit.train.run",
        "zerofit.launch.launch",
        "zerofit.plan.choice",
    ):
        try:
            importlib.import_module(name)
        except Exception as e:  # report all failures
            failed.append(f"CANNOT IMPORT {name}: {type(e).__name__}: {e}")
    took = time.time() - began
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from zerofit.base import allocator, hardware
    from zerofit.commands import calibrate
    from zerofit.plan.speed import measure, rates

    device, lines = (
        "cpu" if CHECK else "cuda",
        [f"python {sys.version.split()[0]}", *versions, f"imports {took:.0f} s, {os.cpu_count()} cores"],
    )
    if not CHECK:
        gpu = torch.cuda.get_device_properties(0)
        lines.insert(0, f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB, driver {gpu_job.nvidia_smi('driver_version')}")
        lines.append(allocator.check_expandable_segments() or "allocator: the user's")
    # Save the model, since a base is quantized while loading.
    with torch.device(device):
        net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(FILES / "small"), dtype=torch.bfloat16)
    net.save_pretrained(FILES / "small")
    known, shown = rates.rates_for(hardware.GPUS["a100-80g"] if CHECK else hardware.find("detect")), []
    try:
        for key, value in measure.measure_rates(
            device, known, calibrate.TINY if CHECK else measure.Sizes(seconds=0.04)
        ).items():
            name, factor, unit = calibrate.TITLES[key]
            shown.append(f"{name} {value * factor:,.1f} for {(getattr(known, key) or 0) * factor:,.1f} {unit}")
    except Exception as e:
        failed.append(f"zerofit calibrate: {type(e).__name__}: {e}")
    return [
        ("versions", not failed, ", ".join([*failed, *lines])),
        ("rates, measured for planned", bool(shown), ", ".join(shown)),
    ]


# --- (b), (e), (g): small runs in parallel ---

COMMON = (
    "--data examples/tiny/train.jsonl --max_length 128 --logging_steps 1 --num_samples 0 --effective_batch_size 32 "
    "--max_steps 12 --per_device_train_batch_size 16 --warmup_steps 0 --lr_scheduler_type constant "
    "--learning_rate 2e-4 --save_strategy"
)
MODELS = {
    "experts": f"{FILES}/mixture --random_init true",
    "save": "examples/tiny/model",
    "resume": "examples/tiny/model",
}  # default: small
SAVE = "steps --save_steps 6 --save_total_limit 5"
RESUMES = [("0", "3"), ("3", "0"), ("2", "1"), ("3", "2 --offload optimizer")]  # from stage to stage
SHARED = {"ZEROFIT_CACHE": str(RUNS / "cache")}  # keeps measurements on a shared GPU out of the 8B plans
ALONE = SHARED | {
    "ZEROFIT_PLAN": "0",
    "ZEROFIT_PAGE": "0",
    "OMP_NUM_THREADS": "2",
    "TORCHINDUCTOR_COMPILE_THREADS": "2",
}
WITH_USERS = {  # name: (recipe, flags, reference of the losses, relative bound: fp16 may skip a step for its scale)
    "z0": ("sft", "--zero 0", "", 0),
    "z1": ("sft", "--zero 1", "z0", 0.03),
    "z2": ("sft", "--zero 2", "z0", 0.03),
    "z3": ("sft", "--zero 3", "z0", 0.03),
    "fp16": ("sft", "--zero 0 --fp16 true", "z0", 0.06),
    "lora z0": ("lora", "--zero 0", "", 0),
    "4-bit base": ("lora", "--zero 0 --load_in_4bit true", "lora z0", 0.1),
    "8-bit base": ("lora", "--zero 0 --load_in_8bit true", "lora z0", 0.05),
    "8-bit Adam": ("sft", "--zero 2 --optim adamw_8bit", "z0", 0.05),
    "experts": ("sft", "--zero 2", "", 0),
}
LATER = {
    **{f"save z{a}": ("sft", f"--zero {a}", "", 0) for a in "032"},
    **{
        f"resume z{a} to z{b}": (
            "sft",
            f"--zero {b} --resume_from_checkpoint '{RUNS}/save z{a}/checkpoint-6'",
            f"save z{a}",
            0.03,
        )
        for a, b in RESUMES
    },
    "z2 offload optimizer": ("sft", "--zero 2 --offload optimizer", "z0", 0.03),
    "z3 offload all": ("sft", "--zero 3 --offload all", "z0", 0.03),
    "fp16 z2": ("sft", "--zero 2 --fp16 true", "z0", 0.06),
    "lora z3": ("lora", "--zero 3", "lora z0", 0.05),
    "4-bit base z3": ("lora", "--zero 3 --load_in_4bit true", "lora z0", 0.1),
    "pure bf16": ("sft", "--zero 0 --pure_bf16 true", "z0", 0.1),
    "flex": ("sft", "--zero 0 --attn_implementation flex_attention --padding_free true", "z0", 0.03),
    "no Liger": ("sft", "--zero 0 --use_liger_kernel false", "z0", 0.03),
    "padded": ("sft", "--zero 0 --padding_free false", "z0", 0.03),
}
ON_CPU = ("z0", "z3", "lora z0", "save z0", "resume z0 to z3")


def flags_of(name: str, flags: str) -> list[str]:
    kind = name.split()[0]
    return shlex.split(
        f"--model {MODELS.get(kind, FILES / 'small')} {COMMON} {SAVE if kind == 'save' else 'no'} {flags}"
    )


def cases_of(settings: dict) -> dict:
    chosen = {name: each for name, each in settings.items() if not CHECK or name in ON_CPU}
    return {
        name: (
            recipe_command(recipe, flags_of(name, flags), RUNS / name),
            ALONE,
            reference if name.startswith("resume") else "",
        )
        for name, (recipe, flags, reference, _) in chosen.items()
    }


def compare(settings: dict, done: dict) -> None:
    known = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    known |= {name: [step["loss"] for step in job.steps()] for name, (job, _) in done.items()}
    LOSSES.write_text(json.dumps(known))
    agreeing = []
    for name in cases_of(settings):
        job, code = done.get(name, (None, "not started"))
        _, _, reference, bound = settings[name]
        losses, count = known.get(name, []), 6 if name.startswith("resume") else 12
        pairs = zip(losses, known.get(reference, [])[-count:], strict=False)
        deviation = max((abs(a - b) / b for a, b in pairs), default=1.0) if reference else 0.0
        notes = self_tests(job) if job else ""
        if code == 0 and len(losses) == count and deviation <= bound:
            agreeing.append(f"{name} {losses[-1]:.3f}" + (f" ({deviation:.2%} from {reference})" if reference else ""))
        else:
            why = error(job) if code else ""
            difference = f"losses {deviation:.1%} from {reference or 'nothing'}"
            report(name, False, f"exit code {code}, {len(losses)} steps, {difference}; {why}; {notes}")
        if name in ("experts", "flex") or "FELL BACK" in notes:
            report(f"{name}, self-tests", "note", notes)
    report(
        "settings",
        bool(agreeing),
        f"{len(agreeing)} of {len(cases_of(settings))} agree, loss after 12 steps: " + ", ".join(agreeing),
    )


def users(stage: str, seconds: float) -> None:
    """Run `make sft` and `make lora` and, in parallel, the first settings, for correctness only."""
    cases = {}
    for verb in ("sft", "lora"):
        words = ["make", verb, f"OUT={RUNS}/make-{verb}"]
        if CHECK:
            words = [
                "launchers/local.sh",
                "--gpus",
                "1",
                f"recipes/{verb}.py",
                "--output_dir",
                f"{RUNS}/make-{verb}",
                "--max_steps",
                "3",
            ]
        cases[f"make-{verb}"] = (words, SHARED | ({"PYTHON": sys.executable} if CHECK else {}), "")
    done = run_parallel(cases | cases_of(WITH_USERS), seconds)
    for name in cases:
        job, code = done.pop(name)
        score = job.json("result.json").get("exact_match_after") if (job.folder / "result.json").exists() else None
        certificate = re.findall(r"^certificate: (.*?) \(", job.output, re.M)[-1:]
        good = code == 0 and (CHECK or (score or 0) > 0.5)
        text = f"exit code {code}, {job.seconds:.0f} s, exact match {score}, certificate {certificate}; "
        report(name, good, text + ("" if good else f"{error(job)}; ") + self_tests(job))
    compare(WITH_USERS, done)


def settings(stage: str, seconds: float) -> None:
    compare(LATER, run_parallel(cases_of(LATER), seconds))


def child_flags() -> list:
    """Check without a GPU which settings zerofit rejects for an H100."""
    from zerofit.base import errors, hardware
    from zerofit.config import resolve

    cases = {
        name: (recipe, flags_of(name, flags))
        for name, (recipe, flags, *_) in (WITH_USERS | LATER).items()
        if "resume" not in name
    }
    cases, refused = (
        cases
        | {
            name: (recipe, shlex.split(flags.replace(f"{FILES}/8b", "tests/configs/llama3.1-8b")))
            for name, (recipe, flags, _) in (BIG | SETTINGS_8B).items()
        },
        [],
    )
    for name, (recipe, flags) in cases.items():
        try:
            resolved = resolve.resolve_settings(
                recipe, [*flags, "--output_dir", "unused"], 1, hardware.find("h100-80g")
            )
            resolve.resolve_for_model(resolved)
        except errors.UserError as e:
            refused.append(f"{name}: {e}")
    return [("flags", not refused, f"{len(cases)} flag sets for an H100; rejected: {refused}")]


# --- (c), (d), NVIDIA's benchmark: 8B ---

EIGHT = (
    f"--model {FILES}/8b --random_init true --max_steps 40 --logging_steps 1 --save_strategy no --num_samples 0 "
    "--learning_rate 1e-5 "
)
AT_2K = EIGHT + f"--data {FILES}/rows.jsonl --max_length {LONG} --effective_batch_size {ROWS} "
AT_4K = (
    EIGHT + f"--data {FILES}/short.jsonl --packing true --max_length {2 * LONG} --effective_batch_size 4 "
    "--per_device_train_batch_size 1 "
)
DENSE, PURE = "--gradient_checkpointing false ", "--pure_bf16 true "
COMPILED, FP8 = ("", "") if CHECK else ("--compile_layers true ", "--fp8 true ")
BIG = {  # name: (recipe, flags, whether by the launcher, whose plan chooses the other settings)
    "lora-8b": ("lora", AT_2K, True),
    "full-8b": ("sft", AT_2K + PURE, True),
    "lora-4k": ("lora", AT_4K, True),
    "full-4k": ("sft", AT_4K + PURE, True),  # NVIDIA publishes 17,809 and 12,412 tok/s
    "lora-4k-compiled": ("lora", AT_4K + DENSE + COMPILED, False),
    "lora-4k-fp8": ("lora", AT_4K + DENSE + COMPILED + FP8, False),
    "full-4k-compiled": ("sft", AT_4K + PURE + "--gradient_checkpointing_every 2 " + COMPILED, False),
}
MIXED = AT_2K.replace("rows.jsonl", "mixed.jsonl")
MICRO_4, SELECTIVE = "--per_device_train_batch_size 4 ", "--gradient_checkpointing_policy selective "
SETTINGS_8B = {  # the effect of single techniques at 8B: the same rows and flags except one
    "lora": ("lora", AT_2K + MICRO_4, False),
    "lora-selective": ("lora", AT_2K + MICRO_4 + SELECTIVE, False),
    "lora-dense": ("lora", AT_2K + MICRO_4 + DENSE, False),
    "lora-no-liger": ("lora", AT_2K + MICRO_4 + DENSE + "--use_liger_kernel false", False),
    "lora-unfused": ("lora", AT_2K + MICRO_4 + DENSE + "--fused_lora false", False),
    "lora-zero1": ("lora", AT_2K + MICRO_4 + DENSE + "--zero 1", False),
    "lora-mixed": ("lora", MIXED + MICRO_4 + DENSE, False),
    "lora-mixed-padded": ("lora", MIXED + MICRO_4 + DENSE + "--padding_free false", False),
    "lora-mixed-no-workers": ("lora", MIXED + MICRO_4 + DENSE + "--dataloader_num_workers 0", False),
    "full-selective": ("sft", AT_2K + MICRO_4 + PURE + SELECTIVE, False),
    "full-no-liger": ("sft", AT_2K + MICRO_4 + PURE + SELECTIVE + "--use_liger_kernel false", False),
    "full-python-adam": ("sft", AT_2K + MICRO_4 + PURE + "--optim_args compile=false", False),
    "full-8bit-adam": ("sft", AT_2K + MICRO_4 + PURE + SELECTIVE + "--optim adamw_8bit", False),
    "full-activation-offload": ("sft", AT_2K + MICRO_4 + PURE + "--activation_offload true", False),
}
CHOSEN = (
    "per_device_train_batch_size",
    "gradient_checkpointing",
    "gradient_checkpointing_every",
    "gradient_checkpointing_policy",
)


def big(name: str, seconds: float) -> None:
    (recipe, words, launched), times = (BIG | SETTINGS_8B)[name], []
    command = (launch_command if launched else recipe_command)(recipe, shlex.split(words), RUNS / name)
    variables = {"PROFILE_OUT": str(OUT / f"profile-{name}.txt"), "PROFILE_STEP": str(STEPS + 1)} | (
        {} if launched else {"ZEROFIT_PLAN": "0"}
    )
    job = start(command, name, PYTHONPATH=f"{HERE}/probe{os.pathsep}{PATH}", **variables)
    while len(times) < STEPS and job.seconds < seconds and job.process.poll() is None:
        times += [job.seconds] * (len(job.steps()) - len(times))
        time.sleep(0.05)
    if len(times) >= STEPS:
        job.prints("PROFILE ", min(seconds, job.seconds + (90 if CHECK else 25)))
    job.kill()
    lines, plan = job.steps()[:STEPS], re.findall(r"^plan: (.*)", job.output, re.M)
    if len(lines) < STEPS:
        report(
            name,
            False,
            "; ".join([f"{len(lines)} steps in {job.seconds:.0f} s", *plan[:2], error(job), self_tests(job)]),
        )
        return
    steady, run = lines[WARM:], job.json("run.json")
    speed, peak = statistics.median(x["tokens_per_second"] for x in steady), steady[-1]["peak_memory_bytes"] / GIB
    planned = [float(x) for x in re.findall(r"([\d.]+) of [\d.]+ GiB per rank, highest", " ".join(plan))]
    expected = (run.get("plan") or {}).get("tokens_per_second")
    report(
        name,
        True,
        f"{speed:,.0f} tok/s"
        + (f" (planned {expected:,.0f})" if expected else "")
        + f", MFU {steady[-1].get('mfu') or 0:.1%}, peak {peak:.2f} GiB, "
        + (f"plan {planned[-1]:.2f} ({planned[-1] / peak - 1:+.1%})" if planned else "no plan")
        + f", outside the allocator {(run.get('outside_allocator') or [0])[-1] / GIB:.2f}"
        + f"; chosen {[run['arguments'][key]['value'] for key in CHOSEN]}, first step after {times[0]:.0f} s, "
        f"losses {lines[0]['loss']:.3f} to "
        f"{lines[-1]['loss']:.3f}; PROFILE {(re.findall(r'^PROFILE (.*)$', job.output, re.M) or ['none'])[-1]}",
    )
    report(f"{name}, self-tests", "note", "; ".join([*plan, self_tests(job)]))


# --- (f), (h), the project's GPU tests ---


TESTS = {  # tests/gpu; "oom": another process leaves 8 GiB, the batch is halved and the effective batch kept
    "oom": {"out of memory": ["tests/gpu/test_recovery.py", "-k", "half_the_batch"]},
    "kernels": {f"kernels {k}": ["tests/gpu/test_attention.py", "-k", k] for k in ("not flex", "flex")},
    "plans": {"peaks of plans": ["tests/gpu/test_plan.py"]},
}


def tests(stage: str, seconds: float) -> None:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "--no-header", "-rfE"]
    words += ["-m", "gpu", "--collect-only"] if CHECK else []
    variables = {"ZEROFIT_TEST_GPU": "0" if CHECK else "1", "ZEROFIT_TEST_GPU_SECONDS": str(int(seconds) - 15)}
    cases = {
        name: ([*words, *more, f"--basetemp={RUNS}/pytest {name}"], variables, "")
        for name, more in TESTS[stage].items()
    }
    for name, (job, code) in run_parallel(cases, seconds).items():
        failures = re.findall(r"^(?:FAILED|ERROR) (.{0,160})", job.output, re.M)
        ends = re.findall(r"^.*(?:passed|failed|collected|selected|%\]).*$", job.output, re.M)[-1:]
        report(
            name,
            code == 0,
            "; ".join([f"exit code {code} after {job.seconds:.0f} s", *(ends or [error(job)]), *failures[:12]]),
        )


def child_loop() -> list:
    """Time gpu_peer.py's bare loop: LoRA in bf16, Liger, no checkpointing."""
    import gpu_peer
    import torch

    for micro in (4, 2):
        with contextlib.suppress(torch.OutOfMemoryError):
            _, seconds = gpu_peer.loop(True, False, not CHECK, micro, FILES / "8b", "cpu" if CHECK else "cuda")
            speed, peak = ROWS * LONG / statistics.median(seconds[WARM:]), torch.cuda.max_memory_allocated() / GIB
            text = (
                f"{speed:,.0f} tok/s, peak {peak:.2f} GiB, micro batch {micro}: LoRA like lora-8b without checkpointing"
            )
            return [("bare loop", True, text)]
        torch.cuda.empty_cache()
    raise MemoryError("micro batch 2 does not fit")


# --- the stages: {stage: (function, minimum of seconds left, maximum of seconds)} ---

FIRST = {
    "machine": (child, 10, 60),
    "users": (users, 30, 120),
    "lora-8b": (big, 45, 125),
    "full-8b": (big, 45, 125),
    "settings": (settings, 35, 100),
    "oom": (tests, 35, 90),
    "loop": (child, 25, 70),
    "lora-4k": (big, 45, 125),
    "full-4k": (big, 45, 125),
}
SPEED = dict.fromkeys(["lora-4k", "full-4k", "lora-4k-compiled", "lora-4k-fp8", "full-4k-compiled"], (big, 45, 125))
GROUPS = {
    "speed": SPEED,
    "settings8b": dict.fromkeys(SETTINGS_8B, (big, 45, 125)),
    "kernels": {"kernels": (tests, 30, 150), "plans": (tests, 40, 150)},
}


def main() -> int:
    global STAGE
    only = sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else ""
    if GROUP == "first" and not only:
        shutil.rmtree(RUNS, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    known = json.loads(STATE.read_text()) if STATE.exists() and GROUP in ("fix", "speed") else {}
    chosen = {"machine": FIRST["machine"]} | GROUPS.get(GROUP, FIRST) | ({"flags": (child, 1, 200)} if CHECK else {})
    try:
        for STAGE, (run, minimum, maximum) in chosen.items():
            needed = STAGE == "machine" and not (FILES / "8b").exists()  # a fresh machine
            if not needed and (
                not re.search(only, STAGE)
                or (known.get(STAGE) and not only)
                or (STAGE == "machine" and GROUP != "first")
            ):
                continue
            if left() < minimum:
                report(STAGE, "later", "not run: no time left")
                continue
            try:
                run(STAGE, min(left() - 4, maximum * (5 if CHECK else 1)))
            except Exception as e:  # continue with the other stages
                report(STAGE, False, f"the stage failed: {type(e).__name__}: {e}")
            stop_all()
            write()
    finally:
        stop_all()
        write()
    wrong = [name for _, _, state, name, _ in LINES if state == "WRONG"]
    print(f"\n{len(LINES)} lines, {len(wrong)} wrong: {', '.join(wrong)}; {OUT}/{GROUP}.md", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    if GROUP == "child":
        print("RESULT " + json.dumps(globals()[f"child_{sys.argv[2]}"]()), flush=True)
    else:
        sys.exit(main())
