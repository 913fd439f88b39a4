"""Define the runs of the GPU tests as data, and run them: several at a time, each in a process, within a budget."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
from gpu_job import Job, launch_command, recipe_command

BUDGET_SECONDS = float(os.environ.get("ZEROFIT_TEST_GPU_SECONDS", 360))
BUDGET_SPENT = f"not run: the budget of {BUDGET_SECONDS:.0f} s for all cases was spent (ZEROFIT_TEST_GPU_SECONDS)"
RATIO = Path(__file__).with_name("offload_ratio.json")  # half of the optimizer is stepped on the CPU
STEPS = 12
SAVED_STEP = 6


@dataclass(frozen=True)
class Case:
    """One run on the bundled model.

    group: its losses must agree with those of the first case of the group, `within` relative.
    must_print, must_not_print: patterns of its output. package: has to be installed. by: "recipe" starts the recipe
    itself, "launcher" `zerofit launch`, "make" `make sft`. after: goes on from that case's checkpoint. interrupt:
    SIGKILL for the rank or SIGTERM for the launcher, after 2 x SAVED_STEP steps. why: what a failure may mean.
    """

    name: str
    flags: str = ""
    recipe: str = "sft"
    group: str = ""
    within: float = 0.03
    must_print: tuple[str, ...] = ()
    must_not_print: tuple[str, ...] = ()
    package: str = ""
    by: str = "recipe"
    after: str = ""
    interrupt: str = ""
    exit_code: int = 0
    seconds: float = 240
    why: str = ""

    def words(self, folder: Path) -> list[str]:
        """Build the command line; folder: that of all run folders."""
        run, flags = folder / self.name, shlex.split(self.flags)
        if self.after:
            flags += ["--resume_from_checkpoint", str(folder / self.after / f"checkpoint-{SAVED_STEP}")]
        if self.by == "make":
            return make_command(self.recipe, run)
        return (launch_command if self.by == "launcher" else recipe_command)(self.recipe, flags, run)


def make_command(verb: str, run: Path) -> list[str]:
    """Build `make <verb>` as a user types it, or, where make would install first, what it would then start."""
    stamp = Path(sys.prefix) / ".zerofit-installed"
    pins = max((ROOT / name).stat().st_mtime for name in ("pyproject.toml", "constraints.txt"))
    if shutil.which("make") and stamp.exists() and stamp.stat().st_mtime >= pins:
        return ["make", verb, "ENV=active", f"PYTHON={sys.executable}", f"OUT={run}"]
    return ["launchers/local.sh", "--gpus", "1", f"recipes/{verb}.py", "--output_dir", str(run)]


# --- what is run ---

TINY = "--model examples/tiny/model --data examples/tiny/train.jsonl --max_length 128 --logging_steps 1 " \
       "--effective_batch_size 32 --per_device_train_batch_size 16"  # fmt: skip
SHORT = f"{TINY} --max_steps {STEPS} --eval_data examples/tiny/eval.jsonl --save_strategy no --num_samples 1"
PACKED = ("note: padding_free is off",)  # not to be printed: the varlen kernel has failed its proof
FUSED = ("note: fused_loss is off",)
BITS, LIGER = "bitsandbytes", "liger_kernel"


def sft(name: str, flags: str, group: str = "", **more) -> Case:
    return Case(name, f"{SHORT} --learning_rate 5e-4 {flags}", "sft", group, **more)


def lora(name: str, flags: str, group: str = "", **more) -> Case:
    return Case(name, f"{SHORT} --learning_rate 2e-3 {flags}", "lora", group, **more)


def stage(zero: str, offload: str = "") -> tuple[str, str]:
    """Return the name and the flags of a stage with offload."""
    if offload:
        return f"z{zero}-{offload}", f"--zero {zero} --offload {offload}"
    return f"z{zero}", f"--zero {zero}"


def stages_and_batches() -> list[Case]:
    """List {sft, lora} x stage x offload, then padded, packed and padding-free batches."""
    cases = []
    offloads = [*((z, "") for z in "0123"), *((z, "optimizer") for z in "123"), ("3", "all")]
    for recipe in (sft, lora):
        for name, flags in (stage(*o) for o in offloads):
            cases.append(recipe(f"{recipe.__name__}-{name}", flags, f"{recipe.__name__} bf16", must_not_print=PACKED))
    eager, flex = "--attn_implementation eager", "--attn_implementation flex_attention --padding_free true"
    return [
        *cases,
        sft("padded-z0", "--zero 0 --padding_free false", "sft bf16", why="sdpa with a padding mask"),
        sft("padded-z3", "--zero 3 --padding_free false", "sft bf16"),
        sft("eager", f"--zero 0 --padding_free false {eager}", "sft bf16"),
        sft("flex-padding-free", f"--zero 0 {flex}", "sft bf16", must_not_print=PACKED, why="needs a C compiler"),
        *(sft(f"packing-z{z}", f"--zero {z} --packing true", "packing", must_not_print=PACKED) for z in "03"),
    ]


def precisions() -> list[Case]:
    """List fp32 without tf32, fp16, and weights and optimizer in bf16."""
    fp32 = "--bf16 false --padding_free"
    return [
        *(sft(f"fp32-z{z}", f"--zero {z} {fp32} false", "fp32", within=2e-4, why="tf32 must be off") for z in "023"),
        sft("fp32-padding-free", f"--zero 0 {fp32} true", "fp32", within=2e-4, why="documents one by one"),
        *(sft(f"fp16-z{z}", f"--zero {z} --fp16 true", must_not_print=PACKED) for z in "0123"),
        *(sft(f"pure-bf16-z{z}", f"--zero {z} --pure_bf16 true", "pure", within=0.05) for z in "023"),
        lora("lora-fp16", "--zero 0 --fp16 true"),
        lora("lora-pure-bf16", "--zero 0 --pure_bf16 true"),
    ]


def memory_techniques() -> list[Case]:
    """List what is recomputed, kept elsewhere or fused, with the same losses."""
    ways = {
        "no-checkpointing": "--gradient_checkpointing false", "every-2nd": "--gradient_checkpointing_every 2",
        "selective": "--gradient_checkpointing_policy selective", "activation-offload": "--activation_offload true",
        "tiled-mlp": "--tiled_mlp 2",
    }  # fmt: skip
    fused = {"must_not_print": FUSED, "why": "addmm with out_dtype and out, fp32 weight under autocast"}
    liger = {"package": LIGER, "why": "Triton"}
    return [
        *(sft(f"{name}-z{z}", f"--zero {z} {flags}", "sft bf16") for name, flags in ways.items() for z in "03"),
        *(sft(f"fused-loss-z{z}", f"--zero {z} --fused_loss true", "sft bf16", **fused) for z in "023"),
        sft("fused-loss-fp16", "--zero 0 --fused_loss true --fp16 true", must_not_print=FUSED),
        lora("lora-fused-loss", "--zero 0 --fused_loss true", "lora bf16", must_not_print=FUSED),
        sft("no-liger-z0", "--zero 0 --use_liger_kernel false", "sft bf16"),
        sft("liger-z0", "--zero 0 --use_liger_kernel true", "sft bf16", **liger),
        sft("liger-z3-fused-loss", "--zero 3 --use_liger_kernel true --fused_loss true", "sft bf16", **liger),
        sft("compile", "--zero 0 --torch_compile true", "sft bf16", why="inductor"),
        lora("lora-compile", "--zero 0 --torch_compile true", "lora bf16", why="inductor"),
    ]


def optimizers() -> list[Case]:
    """List 8-bit and other optimizers, with and without DeepSpeed."""
    plain = [("adafactor", "0"), ("sgd", "2"), ("muon", "0"), ("muon", "2"), ("sophia", "0"), ("sophia", "2")]
    return [
        *(sft(f"adamw-8bit-z{z}", f"--zero {z} --optim adamw_8bit", "8bit", within=0.05, package=BITS) for z in "023"),
        sft("pure-bf16-adamw-8bit", "--zero 0 --pure_bf16 true --optim adamw_8bit", package=BITS),
        sft("lion-8bit", "--zero 0 --optim lion_8bit", package=BITS),
        *(sft(f"{name}-z{z}", f"--zero {z} --optim {name}") for name, z in plain),
        sft("offload-ratio", f"--deepspeed {RATIO}", why="CPU Adam has to be compiled"),
    ]


def quantized() -> list[Case]:
    """List adapters on bases in 4 and 8 bits, and DoRA."""
    four = [stage(z) for z in "0123"] + [stage("2", "optimizer")]
    eight = {"within": 0.05, "package": BITS}
    return [
        *(lora(f"qlora-{name}", f"{flags} --load_in_4bit true", "qlora", package=BITS) for name, flags in four),
        *(lora(f"8bit-base-z{z}", f"--zero {z} --load_in_8bit true", "8bit base", **eight) for z in "02"),
        lora("dora", "--zero 0 --use_dora true"),
    ]


def reports_and_data() -> list[Case]:
    """List the memory report, data workers, streaming and saving."""
    report, saving = ("peak memory of rank 0",), "--save_strategy steps --save_steps 6"
    return [
        *(sft(f"memory-report-z{z}", f"--zero {z} --memory_report true", "sft bf16", must_print=report) for z in "03"),
        sft("no-workers", "--zero 0 --dataloader_num_workers 0", "sft bf16"),
        sft("streaming", "--zero 0 --streaming true"),
        sft("saving-z0", f"--zero 0 {saving}", "sft bf16"),
        sft("saving-z3-all", f"--zero 3 --offload all {saving}", "sft bf16"),
    ]


def resumes() -> tuple[list[Case], list[Case]]:
    """List runs that save, and runs that resume from one of them at every stage, with and without offload."""
    # No warm-up and a small rate: states that are lost or misplaced show, the stages' own roundings do not.
    flags = f"{TINY} --max_steps {STEPS} --num_samples 0 --learning_rate 2e-4 --warmup_steps 0 --lr_scheduler_type " \
            f"constant --save_strategy steps --save_steps {SAVED_STEP} --save_total_limit 5"  # fmt: skip
    kinds = {"sft": ("sft", ""), "lora": ("lora", ""), "fp16": ("sft", " --fp16 true")}
    offloaded = [("2", "2 optimizer"), ("0", "3 all"), ("3", "1 optimizer"), ("3 all", "0"), ("3 all", "2")]
    ways = [("sft", a, b) for a in "0123" for b in "0123"] + [("sft", *way) for way in offloaded]
    ways += [("lora", a, b) for a in "023" for b in "023" if a != b]
    ways += [("fp16", "2", b) for b in "13"]  # the loss scale goes on too
    saved, resumed = {}, []
    for kind, before, after in ways:
        recipe, more = kinds[kind]
        (old, old_flags), (new, new_flags) = stage(*before.split()), stage(*after.split())
        source = f"from-{kind}-{old}"
        saved[source] = Case(source, f"{flags} {old_flags}{more}", recipe)
        resumed.append(Case(f"resume-{kind}-{old}-to-{new}", f"{flags} {new_flags}{more}", recipe, after=source))
    return list(saved.values()), resumed


LONG = f"{TINY} --num_samples 0 --save_strategy steps"
KILLED = Case("killed", f"{LONG} --max_steps 60 --save_steps {SAVED_STEP} --canary false", by="launcher",
              interrupt="SIGKILL")  # fmt: skip
STOPPED = Case("stopped", f"{LONG} --max_steps 20000 --save_steps 10000 --canary false --zero 2", by="launcher",
               interrupt="SIGTERM", exit_code=75)  # fmt: skip
CANARY = Case("canary", f"{LONG} --max_steps 6 --save_steps 3 --eval_data examples/tiny/eval.jsonl --canary true",
              by="launcher", must_print=("canary passed",))  # fmt: skip
USER_COMMANDS = [Case(f"make-{verb}", recipe=verb, by="make") for verb in ("sft", "lora")]
SAVED, RESUMED = resumes()
SETTINGS = [
    *stages_and_batches(), *precisions(), *memory_techniques(), *optimizers(), *quantized(), *reports_and_data(),
]  # fmt: skip
# The order in which they start; what the budget does not reach stands last.
ALL = {case.name: case for case in [*USER_COMMANDS, KILLED, STOPPED, CANARY, *SAVED, *RESUMED, *SETTINGS]}


def first_of_group(case: Case) -> Case:
    return next(other for other in SETTINGS if other.group == case.group)


def with_what_they_need(names: set[str]) -> list[Case]:
    """Return these cases, those that they go on from and those that they are compared with."""
    wanted = [ALL[name] for name in names]
    more = {case.after for case in wanted if case.after} | {first_of_group(case).name for case in wanted if case.group}
    return [case for case in ALL.values() if case.name in names | more]


# --- how it is run ---


@dataclass
class Outcome:
    """The result of a case. reached: False where the budget was spent before its end."""

    reached: bool = False
    exit_code: int | None = None  # None: it took longer than its `seconds`
    steps: list[dict] = field(default_factory=list)
    output: str = ""
    folder: Path | None = None

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]


def run_all(cases: list[Case], folder: Path, parallel: int, budget_seconds: float) -> dict[str, Outcome]:
    """Run the cases, `parallel` at a time, and return {name: Outcome}; what runs when the budget is spent is killed."""
    end, waiting, running, outcomes = time.monotonic() + budget_seconds, list(cases), {}, {}
    interrupted = set()
    while (waiting or running) and time.monotonic() < end:
        for case in [c for c in waiting if not c.after or c.after in outcomes][: parallel - len(running)]:
            waiting.remove(case)
            # The check before a launch is left out where the launcher is not what is tested.
            variables = {"ZEROFIT_PLAN": "0"} if case.by == "recipe" else {"PYTHON": sys.executable}
            running[case] = Job(case.words(folder), folder / case.name, variables)
        for case, job in list(running.items()):
            if case.interrupt and case not in interrupted and len(job.steps()) > 2 * SAVED_STEP:
                interrupted.add(case)
                interrupt(case, job)
            if job.process.poll() is not None or job.seconds > case.seconds:
                del running[case]
                code = job.finish(0)
                outcomes[case.name] = Outcome(True, code, job.steps(), job.output, job.folder)
        time.sleep(0.05)
    for job in running.values():
        job.kill()
    return {case.name: outcomes.get(case.name, Outcome()) for case in cases}


def interrupt(case: Case, job: Job) -> None:
    """Send SIGTERM to the launcher, or kill the rank that it has started."""
    if case.interrupt == "SIGTERM":
        job.process.send_signal(signal.SIGTERM)
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(job.process.pid).children(recursive=True):
            if any(word.endswith(f"recipes/{case.recipe}.py") for word in child.cmdline()):
                child.kill()


def check(case: Case, outcome: Outcome) -> None:
    """Assert the exit code and the output of a case; skip where the budget did not reach it."""
    if not outcome.reached:
        pytest.skip(BUDGET_SPENT)
    details = f"{case.name} ({case.why or 'see the end of its output'})\n{outcome.output[-4000:]}"
    assert outcome.exit_code == case.exit_code, details
    for pattern in case.must_print:
        assert re.search(pattern, outcome.output), f"not in the output: {pattern}; {details}"
    for pattern in case.must_not_print:
        assert not re.search(pattern, outcome.output), f"in the output: {pattern}; {details}"
