"""Try every class of transformers' causal and image-text models with a tiny model; write the list of `zerofit models`.

make models                                    what benchmarks/results/models.json lacks (two hours on two cores)
make models ARGS="--kinds llama qwen3 --again"
make models ARGS=--page                        only the list
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks"), str(Path(__file__).parent)]

import conftest  # noqa: E402
import machine  # noqa: E402
import matrix_page  # noqa: E402
import plan  # noqa: E402
import tiny_models  # noqa: E402

from zerofit.base import rank_status  # noqa: E402
from zerofit.report import live  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "models.json"
COMMON = [
    "--data", str(conftest.TINY / "train.jsonl"), "--max_samples", "12", "--max_steps", "3", "--num_samples", "0",
    "--effective_batch_size", "4", "--per_device_train_batch_size", "2", "--max_length", "128", "--warmup_steps", "0",
    "--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--save_strategy", "no", "--logging_steps", "1",
    "--bf16", "false",
]  # fmt: skip
PLAIN = ["--gradient_checkpointing", "false", "--fused_loss", "false", "--zero", "0"]
PADDED = [*PLAIN, "--padding_free", "false"]
WITHOUT_PAGES = {"OMP_NUM_THREADS": "1", live.OFF: "0"}
OUT_OF_SCOPE = "not trained on text: "
LONGEST = 240  # seconds of a run
AT_ONCE = 2  # types that are tried beside each other
CHUNK = 24  # types whose plans are simulated together: starting the simulation takes longest

# column -> (recipe, flags, ranks, flag that a run may turn off, largest relative difference of a loss from `padded`'s)
RUNS = {
    "padded": ("sft", PADDED, 1, None, None),
    "side by side": ("sft", [*PADDED, "--padding_free", "true"], 1, "padding_free", 1e-4),
    "packed": ("sft", [*PLAIN, "--packing", "true"], 1, "packing", None),
    "checkpointing": ("sft", [*PADDED, "--gradient_checkpointing", "true"], 1, "gradient_checkpointing", 1e-5),
    "fused loss": ("sft", [*PADDED, "--fused_loss", "true"], 1, "fused_loss", 1e-4),
    "LoRA": ("lora", ["--padding_free", "false", "--zero", "0"], 1, None, None),
    "ZeRO-3": ("sft", [*PADDED, "--zero", "3"], 2, None, 1e-4),
}
OTHERS = ("plan", "export", "reload", "generate")
COLUMNS = ("built", *RUNS, *OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=[*dict.fromkeys((*tiny_models.CAUSAL, *tiny_models.IMAGE_TEXT))])
    parser.add_argument("--again", action="store_true", help="try also what was tried on another commit")
    parser.add_argument("--page", action="store_true", help="write the list from the result file, train nothing")
    given = parser.parse_args()
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"kinds": {}}
    known, commit = record["kinds"], machine.code_commit()
    tried_before = {kind for kind in known if not given.again or known[kind].get("commit") == commit}
    wanted = [] if given.page else [kind for kind in given.kinds if kind not in tried_before]
    for first in range(0, len(wanted), CHUNK):
        with tempfile.TemporaryDirectory() as folder:
            try_all(wanted[first : first + CHUNK], Path(folder), known)
        record["versions"] = machine.versions()
        RESULTS.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        print(f"{min(first + CHUNK, len(wanted))} of {len(wanted)} tried", flush=True)
    matrix_page.write(record)


def try_all(kinds: list[str], folder: Path, found: dict) -> None:
    """Try these types and put each one's {"columns", "date", "commit"} into `found`."""
    about = {"date": time.strftime("%Y-%m-%d"), "commit": machine.code_commit()}
    with ProcessPoolExecutor(AT_ONCE, multiprocessing.get_context("spawn")) as pool:
        for kind, columns in zip(kinds, pool.map(tried, kinds, [folder / kind for kind in kinds]), strict=True):
            found[kind] = {"columns": columns} | about
    trained_ones = [kind for kind in kinds if found[kind]["columns"].get("padded") == ""]
    cases = [("sft", f"--model {folder / kind / 'model'} --zero 2 --padding_free false", 2) for kind in trained_ones]
    for kind, row in zip(trained_ones, plan.compare(cases), strict=True):
        found[kind]["columns"]["plan"] = _last_line(row["failed"]) if "failed" in row else planned(**row)


def planned(predicted: dict, measured: dict, **row) -> str:
    """Return "" or by how much the bytes of a step's phases are not those of real tensors."""
    off = {phase: predicted[phase] / size - 1 for phase, size in measured.items() if phase != "load"}
    phase = max(off, key=lambda name: abs(off[name]))
    return f"{off[phase]:+.2%} of the bytes of real tensors ({phase})" if off[phase] else ""


def tried(kind: str, folder: Path) -> dict[str, str]:
    """Return {column: "" or why it does not hold} and print those; nothing comes after what is not made or trained."""
    began = time.time()
    columns = columns_of(kind, folder)
    bad = ", ".join(name for name, why in columns.items() if why)
    print(f"{kind}: {f'not {bad}' if bad else 'all'} ({time.time() - began:.0f} s)", flush=True)
    return columns


def columns_of(kind: str, folder: Path) -> dict[str, str]:
    if kind in tiny_models.OUT_OF_SCOPE:
        return {"built": OUT_OF_SCOPE + tiny_models.OUT_OF_SCOPE[kind]}
    model = folder / "model"
    try:
        tiny_models.checkpoint(kind, model)
    except Exception as error:
        return {"built": _one_line(error)}
    columns, runs = {"built": ""}, {}
    for name, (recipe, flags, ranks, *_) in RUNS.items():
        words = [*COMMON, "--model", str(model), *flags, "--output_dir", str(folder / name.replace(" ", "-"))]
        columns[name] = trained(recipe, words, ranks)
        if not columns[name]:
            runs[name] = conftest.Run(Path(words[-1]))
        elif name == "padded":
            return columns
    for name, run in runs.items():
        columns[name] = columns[name] or compared(run, runs["padded"], *RUNS[name][3:])
    final = runs["padded"].folder / "final"
    columns["export"] = exported(runs["padded"].folder, folder / "export")
    columns["reload"] = reloaded(kind, final, model)
    columns["generate"] = generated(kind, final)
    return columns


def trained(recipe: str, words: list[str], ranks: int) -> str:
    """Train; return "" or why it failed: the sentence of a refusal, else the exception."""
    program = [str(ROOT / "recipes" / f"{recipe}.py"), *words, "--gpus", str(ranks)]
    # Each run has a folder of its own: where two share one, the second truncates the heartbeat file that the first has
    # mapped, and the first ends with SIGBUS.
    with tempfile.TemporaryDirectory() as folder:
        environment = WITHOUT_PAGES | {rank_status.FOLDER: folder}
        try:
            done = conftest.run_python(program, ranks=ranks if ranks > 1 else 0, timeout=LONGEST, **environment)
        except subprocess.TimeoutExpired:
            return f"no end within {LONGEST} s"
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    said = [line for line in lines if "error:" in line.lower() or line.split(":")[0].endswith(("Error", "Exception"))]
    if not said:
        return f"exit code {done.returncode} after: {(lines or ['no output'])[-1]}"[:300]
    return said[0 if any("zerofit" in one for one in said) else -1][:300]


def compared(run, reference, flag: str | None, bound: float | None) -> str:
    """Return "" or what differs: a flag that the run has turned off, a loss that is none or not the padded run's."""
    facts = run.json("run.json")
    said = [line for line in facts["decisions"] if line.startswith(f"{flag} false")]
    if flag and (said or facts["arguments"][flag]["value"] in (False, "false")):
        return f"turned off: {said[0].partition(': ')[2] if said else 'no reason given'}"[:300]
    losses = run.losses
    if len(losses) != 3 or any(loss != loss or loss <= 0 for loss in losses):
        return f"losses {losses}"
    apart = max(abs(one / other - 1) for one, other in zip(losses, reference.losses, strict=True))
    return f"losses differ from padded rows' by {apart:.1e}" if bound and apart > bound else ""


def exported(run: Path, out: Path) -> str:
    words = ["-m", "zerofit", "export", str(run), "--output_dir", str(out)]
    try:
        done = conftest.run_python(words, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return f"no end within {LONGEST} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines or ["no output"])[-1][:300]


def reloaded(kind: str, final: Path, before: Path) -> str:
    """Return "" if transformers loads final/ in the class and with the tensors that the base had."""
    try:
        (model, about), (base, _) = (
            tiny_models.loader_of(kind).from_pretrained(folder, output_loading_info=True) for folder in (final, before)
        )
    except Exception as error:
        return _one_line(error)
    wrong = [*about["missing_keys"], *about["unexpected_keys"], *about["mismatched_keys"]]
    names = {name for name, _ in model.named_parameters()} ^ {name for name, _ in base.named_parameters()}
    bad = wrong or sorted(names) or ([] if type(model) is type(base) else [type(model).__name__])
    return f"{len(bad)} tensors are not those of the base: {bad[0]}"[:300] if bad else ""


def generated(kind: str, final: Path) -> str:
    import torch

    try:
        model = tiny_models.loader_of(kind).from_pretrained(final)
        ids = torch.tensor([[5, 6, 7, 8]])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, eos_token_id=None
        )
    except Exception as error:
        return _one_line(error)
    return "" if out.shape[1] >= 5 else f"{out.shape[1] - 4} tokens instead of 4"


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1].strip()[:300]


def _one_line(error: Exception) -> str:
    text = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


if __name__ == "__main__":
    main()
