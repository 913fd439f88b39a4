"""recipes/dpo.py --loss_type kto: equal to a textbook loop with a second model, for every split of a step."""

import functools
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import test_preference as pairs
import torch
from conftest import recipe_process, run_world, runs_slow, slow_but
from safetensors.torch import load_file

from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.data.conversations import IGNORE
from zerofit.objective import labeled, mismatched

STEPS, BATCH, RATE, BETA, DESIRABLE, UNDESIRABLE = 7, 4, 1e-3, 0.5, 1.5, 0.6  # over the end of an epoch, with fillers
ADAPTER = pairs.ADAPTER


def flags(folder, *more):
    return [
        *pairs.flags(folder), "--data", str(folder / "rows.jsonl"), "--eval_data", str(folder / "rows_held_out.jsonl"),
        "--loss_type", "kto", "--beta", str(BETA), "--desirable_weight", str(DESIRABLE),
        "--undesirable_weight", str(UNDESIRABLE), "--max_steps", str(STEPS), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small random model, 22 and 5 answers of uneven lengths with labels: an epoch ends with two fillers."""
    folder = tmp_path_factory.mktemp("unpaired")
    pairs.write_inputs(folder)
    rng = random.Random(5)
    for name in ("pairs", "held_out"):
        read = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        rows = [{"prompt": row["prompt"], "completion": row["chosen"], "label": rng.random() < 0.6} for row in read]
        rows[0]["label"], rows[1]["label"] = True, False
        rows[2]["prompt"] = rows[1]["prompt"]  # whose KL term takes no answer to the same question
        file = folder / {"pairs": "rows.jsonl", "held_out": "rows_held_out.jsonl"}[name]
        file.write_text("\n".join(map(json.dumps, rows)))
    return folder


LONG = ("full, micro 1, fused", "full, ZeRO 3", "full, micro 4", "full, micro 2, concatenated", "lora, precomputed",
        "full, ZeRO 1", "full, ZeRO 2", "lora, ZeRO 3", "apo, ZeRO 0", "lora, micro 4")  # fmt: skip
FAST = ("lora, micro 2", "lora, ZeRO 2")


def of_this_run(request, cases: dict) -> dict:
    return cases if runs_slow(request) else {name: case for name, case in cases.items() if name in (*FAST, "untrained")}


@pytest.fixture(scope="module")
def on_one_rank(folder, request):
    f = flags(folder)
    cases = {
        "full, micro 4": [*f, "--per_device_train_batch_size", "4"],
        "full, micro 1, fused": [*f, "--per_device_train_batch_size", "1", "--fused_loss", "true"],
        "full, micro 2, concatenated": [*f, "--padding_free", "true"],
        "lora, micro 2": [*f, *ADAPTER],
        "lora, micro 4": [*f, *ADAPTER, "--per_device_train_batch_size", "4", "--fused_loss", "true"],
        "lora, precomputed": [*f, *ADAPTER, "--precompute_ref_log_probs", "true"],
        "untrained": [*f, *ADAPTER, "--learning_rate", "0", "--max_steps", "1"],
    }
    return run_world(1, of_this_run(request, {name: ("dpo", case) for name, case in cases.items()}), folder)


@pytest.fixture(scope="module")
def on_two_ranks(folder, request):
    f, cases = flags(folder), {}
    for zero in "0123":
        split = ["--zero", zero, "--per_device_train_batch_size", "12"[zero == "1"], "--fused_loss", "true"]
        split += ["--gradient_checkpointing", str(zero == "3").lower()]
        cases[f"full, ZeRO {zero}" if zero != "0" else "apo, ZeRO 0"] = ("dpo", [*f, *split])
        cases[f"lora, ZeRO {zero}"] = ("dpo", [*f, *split, *ADAPTER])
    del cases["lora, ZeRO 0"], cases["lora, ZeRO 1"]
    cases["apo, ZeRO 0"][1].extend(["--loss_type", "apo_zero_unpaired"])
    return run_world(2, of_this_run(request, cases), folder)


@pytest.fixture(scope="module")
def run_of(request):
    """Return a function from a case's name to its run."""
    return lambda name: request.getfixturevalue("on_two_ranks" if "ZeRO" in name else "on_one_rank")[name]


# --- the textbook: equation 7 of arXiv 2402.01306, row by row, with the reference as a second model ---


def encoded(tokenizer, folder, name):
    """Return [(tokens of the prompt, of the answer, label)] of the rows of a file."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    prompts = [f"<|user|>\n{row['prompt']}<|end|>\n<|assistant|>\n" for row in rows]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    whole = [tokenizer(f"{p}{row['completion']}<|end|>")["input_ids"] for p, row in zip(prompts, rows, strict=True)]
    return [(p, w[len(p) :], row["label"]) for p, w, row in zip(ids, whole, rows, strict=True)]


class Textbook:
    """A loop in plain PyTorch."""

    def __init__(self, folder, tokenizer, kind, adapter):
        from peft import LoraConfig, get_peft_model

        self.kind, self.model, self.second = kind, pairs.load(folder), pairs.load(folder)
        if kind == "lora":
            config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
            self.model, initial = get_peft_model(self.model, config), load_file(adapter)
            for name, p in self.model.named_parameters():
                if p.requires_grad:
                    p.data = initial[name.replace(".default", "")].clone()
        self.rows, self.held_out = (encoded(tokenizer, folder, f) for f in ("rows.jsonl", "rows_held_out.jsonl"))

    def ratio(self, prompt, answer):
        with torch.no_grad():
            reference = pairs.log_prob(self.second, [*prompt, *answer], len(prompt))
        return pairs.log_prob(self.model, [*prompt, *answer], len(prompt)) - reference

    def kl(self, blocks):
        """Return z: the mean of all rows' prompts with another row's answer, of the same block."""
        if self.kind == "apo":
            return torch.zeros(())
        found = []
        for block in blocks:
            for i, (prompt, _, _) in enumerate(block):
                others = [block[i - k] for k in range(1, len(block))]
                answer = next(other[1] for other in others if other[0] != prompt)
                found.append(self.ratio(prompt, answer).detach())
        return torch.stack(found).mean().clamp(min=0)

    def losses(self, rows, z):
        found, rewards = [], {True: [], False: []}
        for prompt, answer, label in rows:
            r = self.ratio(prompt, answer)
            value = torch.sigmoid(BETA * (r - z)) if label else torch.sigmoid(BETA * (z - r))
            found.append((DESIRABLE if label else UNDESIRABLE) * (1 - value))
            rewards[label].append(BETA * r.item())
        return torch.stack(found).mean(), {label: np.mean(values) for label, values in rewards.items() if values}

    def train(self) -> dict:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, RATE, weight_decay=0.0)
        epoch = [*range(len(self.rows)), *[None] * (-len(self.rows) % BATCH)]
        found = {name: [] for name in ("loss", "grad_norm", "kl", "rewards/chosen", "rewards/rejected")}
        for step in range(STEPS):
            at = step * BATCH % len(epoch)
            block = [self.rows[i] for i in epoch[at : at + BATCH] if i is not None]
            z = self.kl([block])
            loss, rewards = self.losses(block, z)
            loss.backward()
            found["grad_norm"].append(torch.nn.utils.clip_grad_norm_(trained, 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
            found["loss"].append(loss.item())
            found["kl"].append(z.item())
            found["rewards/chosen"].append(rewards.get(True))
            found["rewards/rejected"].append(rewards.get(False))
        with torch.no_grad():
            blocks = [self.held_out[i : i + BATCH] for i in range(0, len(self.held_out), BATCH)]
            # The last row is alone in its block: it takes the answer of the row before it in the file.
            alone = [[self.held_out[-2], blocks.pop()[0]]] if len(blocks[-1]) == 1 else []
            ratios = [self.ratio(alone[0][1][0], alone[0][0][1])] if alone and self.kind != "apo" else []
            z = self.kl_of(blocks, ratios)
            found["eval_loss"], _ = self.losses(self.held_out, z)
        return found

    def kl_of(self, blocks, more):
        if self.kind == "apo":
            return torch.zeros(())
        ratios = []
        for block in blocks:
            for i, (prompt, _, _) in enumerate(block):
                others = [block[i - k] for k in range(1, len(block))]
                ratios.append(self.ratio(prompt, next(o[1] for o in others if o[0] != prompt)))
        return torch.stack([*ratios, *more]).mean().clamp(min=0)


@pytest.fixture(scope="module")
def textbook_of(request, folder):
    """Return a function from "full", "lora" or "apo" to its textbook's numbers."""
    from transformers import AutoTokenizer

    adapter = request.getfixturevalue("on_one_rank")["untrained"].folder / "final" / "adapter_model.safetensors"
    tokenizer = AutoTokenizer.from_pretrained(pairs.MODEL)

    @functools.cache
    def numbers(kind):
        return Textbook(folder, tokenizer, kind, adapter).train()

    return numbers


NAMES = slow_but([*FAST, *LONG], set(FAST))


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_the_steps_are_those_of_a_textbook_loop_with_a_second_model(run_of, textbook_of, name, record_property):
    run, wanted = run_of(name), textbook_of(name.partition(",")[0])
    lines = [line for line in run.metrics if "loss" in line]
    assert run.losses == pytest.approx(wanted["loss"], abs=1e-5) and len(lines) == STEPS
    assert run.grad_norms == pytest.approx(wanted["grad_norm"], rel=1e-3)
    if name[:3] != "apo":
        assert [line["kl"] for line in lines] == pytest.approx(wanted["kl"], abs=2e-4) and max(wanted["kl"]) > 0.1
    for key in ("rewards/chosen", "rewards/rejected"):
        for line, value in zip(lines, wanted[key], strict=True):  # a step may have answers of one label only
            assert (key in line) == (value is not None)
            assert value is None or line[key] == pytest.approx(value, abs=2e-4)
    assert run.json("result.json")["eval_loss"] == pytest.approx(wanted["eval_loss"].item(), abs=1e-5)
    record_property("difference", max(abs(a - b) for a, b in zip(run.losses, wanted["loss"], strict=True)))


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize("more", [[], [*ADAPTER, "--lora_dropout", "0.1"]], ids=["full", "lora"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, folder, more):
    words = [*flags(folder), *more, "--save_strategy", "steps", "--save_steps", "4", "--save_total_limit", "2"]
    words += ["--train_sampling_strategy", "random", "--eval_strategy", "steps", "--eval_steps", "2"]
    for name, others in (
        ("whole", []),
        ("resumed", ["--resume_from_checkpoint", str(tmp_path / "whole/checkpoint-4")]),
    ):
        done = recipe_process("dpo", *words, *others, "--output_dir", str(tmp_path / name))
        assert done.returncode == 0, done.stdout + done.stderr
    file = "adapter_model.safetensors" if more else "model.safetensors"
    weights = [load_file(tmp_path / name / "final" / file) for name in ("whole", "resumed")]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    done = recipe_process("dpo", *words, *others, "--output_dir", str(tmp_path / "third"), "--desirable_weight", "2")
    assert done.returncode == 2 and "was saved with desirable_weight 1.5, this run has 2.0" in done.stderr


def test_partners_rotate_in_the_steps_and_avoid_answers_to_the_same_prompt():
    order = [3, 1, 2, 0, 4, 5, 6, 7]  # 6 and 7 are fillers
    assert mismatched.partners(order, [0, 1, 2, 3, 4, 5], 4).tolist() == [2, 3, 1, 0, 5, 4]
    assert mismatched.partners(order, [0, 1, 1, 3, 4, 4], 4).tolist() == [2, 3, 3, 0, 5, 4]
    assert mismatched.partners([0, 1, 2], [0, 1, 2], 2).tolist() == [1, 0, 1]  # the last is alone


def test_a_mismatched_document_is_one_rows_prompt_and_anothers_answer_cut_at_max_length():
    row = {"input_ids": [1, 2, 3, 4], "labels": [IGNORE, IGNORE, 3, 4]}
    other = {"input_ids": [5, 6, 7, 8], "labels": [IGNORE, 6, IGNORE, 8]}  # a tool's result inside
    both = mismatched.joined(row, other, 4)
    assert both == {"input_ids": [1, 2, 6, 7], "labels": [IGNORE, IGNORE, 6, IGNORE]}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rpo_alpha", "1"], "--rpo_alpha with --loss_type kto: its rows are single answers"),
        (["--effective_batch_size", "1", "--per_device_train_batch_size", "1"], "use 2 or more"),
        (["--label_smoothing", "0.1"], "--label_smoothing with --loss_type kto"),
        (["--loss_type", "sigmoid", "--desirable_weight", "2"], "only kto and apo_zero_unpaired use it"),
        (["--desirable_weight=-1"], "--desirable_weight is -1.0: it must be 0 or more"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(folder, words, said):
    model = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--use_cpu", "true"]
    with pytest.raises(UserError) as refused:
        resolve.resolve_settings("dpo", [*model, "--loss_type", "kto", *words], 1)
    assert said in str(refused.value)


def test_the_plan_counts_the_forwards_without_a_backward(folder):
    model = ["--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--use_cpu", "true"]
    cases = [([], 1), (ADAPTER, 3), ([*ADAPTER, "--precompute_ref_log_probs", "true"], 1)]
    for words, count in cases:
        settings = resolve.resolve_settings("dpo", [*model, "--loss_type", "kto", *words], 1)
        assert settings.objective.extra_forwards(settings) == count and settings.objective.documents == 1
    settings = resolve.resolve_settings("dpo", [*model, "--loss_type", "apo_zero_unpaired", *ADAPTER], 1)
    assert settings.objective.extra_forwards(settings) == 1


def test_the_filler_of_a_batch_is_its_own_mismatched_document():
    collate = labeled.LabeledCollator(SimpleNamespace(packed=False), True)
    collate.collate = lambda rows: {"input_ids": [row["input_ids"] for row in rows]}
    row = {"input_ids": [1], "labels": [1], "labeled": [1], "mismatched": {"input_ids": [2], "labels": [2]}}
    batch = collate([row, {"input_ids": [0, 0], "labels": [IGNORE, IGNORE]}])
    assert batch["input_ids"] == [[1], [0, 0]] and batch["kl_input_ids"] == [[2], [0, 0]]
    assert batch["wanted"].tolist() == [True, False]
