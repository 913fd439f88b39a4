"""What the host waits for in a step: the operations of the real trainer, followed on two ranks at every stage."""

import json

import pytest
from conftest import ROOT, TINY, run_python, two_layers

COMMON = f"""--model {two_layers()} --data {TINY / "train.jsonl"} --max_samples 32 --max_steps 6
    --effective_batch_size 8 --per_device_train_batch_size 2 --logging_steps 10 --num_samples 0 --save_strategy no
    --use_cpu true --dataloader_num_workers 1""".split()

FOUND_INF = "nan_guard.py:<lambda>"  # whether the schedule goes on; read when the optimizer is queued
NORM = "utils.py:is_invalid_grad_norm"  # of DeepSpeed: whether the step is skipped, before it queues the optimizer

# {stage: {place: how often the host needs a value there}} in a step without a log line.
REASONS = {
    0: {FOUND_INF: 1},
    1: {NORM: 3},  # the norm, and again for each group of parameters, when nothing is queued any more
    2: {NORM: 3},
    3: {NORM: 1},
}


def waits(tmp_path, cases: dict[str, tuple[str, list[str]]]) -> dict[str, dict[str, int]]:
    """Return {case: {place: count}} of two ranks."""
    asked = {name: [recipe, [*COMMON, *flags, "--output_dir", str(tmp_path / name)]]
             for name, (recipe, flags) in cases.items()}  # fmt: skip
    done = run_python([str(ROOT / "tests" / "train" / "waits_ranks.py"), json.dumps(asked)], ranks=2, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.rsplit("WAITS ", 1)[1].splitlines()[0])


@pytest.mark.slow
def test_the_host_waits_for_the_norm_alone(tmp_path):
    """No loss, no count and no mask is read in a step; the batches of two micro batches come from a worker."""
    found = waits(tmp_path, {f"z{zero}": ("sft", ["--zero", str(zero)]) for zero in REASONS})
    assert found == {f"z{zero}": reasons for zero, reasons in REASONS.items()}


@pytest.mark.slow
def test_the_host_waits_for_the_norm_alone_with_adapters_and_pairs(tmp_path):
    cases = {f"lora-z{zero}": ("lora", ["--zero", str(zero)]) for zero in (0, 2, 3)}
    found = waits(tmp_path, cases)
    assert {name: set(places) for name, places in found.items()} == {
        f"lora-z{zero}": set(REASONS[zero]) for zero in (0, 2, 3)
    }
