"""What the host waits for in a step: operations and calls of the real trainer, on two ranks at every stage.

waits_ranks.py says what cannot be seen without a GPU.
"""

import json

import pytest
from conftest import ROOT, TINY, run_python, two_layers

COMMON = f"""--model {two_layers()} --data {TINY / "train.jsonl"} --max_samples 32 --max_steps 6
    --effective_batch_size 8 --per_device_train_batch_size 2 --logging_steps 10 --num_samples 0 --save_strategy no
    --use_cpu true --dataloader_num_workers 1""".split()

PREFERENCES = ["--data", str(TINY / "preference" / "train.jsonl"), "--max_length", "128"]

FOUND_INF = "nan_guard.py:<lambda>"  # whether the schedule goes on; read when the optimizer is queued
NORM = "utils.py:is_invalid_grad_norm"  # of DeepSpeed: whether the step is skipped, before it queues the optimizer
REDUCED = "stage3.py:independent_gradient_partition_epilogue"  # DeepSpeed: until a backward's gradients are reduced
WHOLE = "partition_parameters.py:_allgather_params_coalesced"  # DeepSpeed: until the vectors, kept whole, are gathered

# The loop over documents in the attention of a CPU and of fp32; a GPU's kernel gets the boundaries as a tensor.
LOOP = "linear_attention.py:spans"

# {stage: {place: how often the host waits there}} in a step without a log line.
REASONS = {
    0: {FOUND_INF: 1},
    1: {NORM: 3},  # the norm, and again for each group of parameters, when nothing is queued any more
    2: {NORM: 3},
    3: {NORM: 1, REDUCED: 2, WHOLE: 1},
}

OF_A_FORWARD = 8  # reads of LOOP: starts and ends, of two layers and two micro batches


def reasons(zero: int, forwards: int, groups: int = 2) -> dict[str, int]:
    """Return the counts of a step. Args: forwards: of a micro batch, the backward's included; groups: of parameters."""
    norms = {NORM: 1 + groups} if zero in (1, 2) else {}
    return REASONS[zero] | norms | {LOOP: forwards * OF_A_FORWARD}


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
    assert found == {f"z{zero}": reasons(zero, forwards=2) for zero in REASONS}


@pytest.mark.slow
def test_the_host_waits_for_the_norm_alone_with_adapters(tmp_path):
    found = waits(tmp_path, {f"lora-z{zero}": ("lora", ["--zero", str(zero)]) for zero in REASONS})
    assert found == {f"lora-z{zero}": reasons(zero, forwards=2, groups=1) for zero in REASONS}


@pytest.mark.slow
def test_the_host_waits_for_the_norm_alone_with_pairs(tmp_path):
    """Without an adapter the reference is computed before the first step, with one in a third forward.

    At stage 3 that is a part of the step's trace (patches.same_trace): else the ranks would compare new ones.
    """
    adapter = ["--adapter", "lora"]
    cases = {f"dpo-z{zero}": [*adapter, "--zero", str(zero)] for zero in REASONS}
    cases["before-z3"] = [*adapter, "--precompute_ref_log_probs", "true", "--zero", "3"]
    cases |= {f"full-z{zero}": ["--zero", str(zero)] for zero in (0, 3)}
    found = waits(tmp_path, {name: ("dpo", [*PREFERENCES, *flags]) for name, flags in cases.items()})
    assert found == {
        **{f"dpo-z{zero}": reasons(zero, forwards=3, groups=1) for zero in REASONS},
        "before-z3": reasons(3, forwards=2, groups=1),
        **{f"full-z{zero}": reasons(zero, forwards=2) for zero in (0, 3)},
    }


@pytest.mark.slow
def test_the_forwards_of_ktos_kl_term_are_a_part_of_the_steps_trace(tmp_path):
    """Else the ranks compared a new trace in each step: 450 reads. Those forwards come before what is counted."""
    kto = [*PREFERENCES, "--loss_type", "kto"]
    found = waits(tmp_path, {"lora": ("dpo", [*kto, "--adapter", "lora", "--zero", "3"]),
                             "full": ("dpo", [*kto, "--zero", "3"])})  # fmt: skip
    assert found == {"lora": reasons(3, forwards=3, groups=1), "full": reasons(3, forwards=2)}
