"""Compare runs of the recipes, number by number, with a training loop in plain PyTorch that shares no code with them.

python benchmarks/oracle.py                      # all 44 cases
python benchmarks/oracle.py --only lora experts  # those whose names hold one of the words

The loop takes one row after another, without padding, in the order of docs/certificate.md. Cross entropy, router loss,
LoRA, clipping, AdamW and the schedule are written out here; transformers builds the models, which give logits and
router logits. It compares loss, gradient norm and learning rate of each step, the final weights, and the eval loss.
Prints the largest relative difference of each and exits with 1 when one is beyond its bound. All cases: writes
benchmarks/results/oracle.{json,md}.
"""

import argparse
import contextlib
import json
import math
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import machine
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear

ROWS, BATCH, EPOCHS, SEED = 20, 8, 2, 7  # the last batch of an epoch has 4 rows and 4 fillers
STEPS = EPOCHS * math.ceil(ROWS / BATCH)
LEARNING_RATE, WARMUP, CLIP, DECAY = 1e-3, 2, 0.5, 0.1
BETAS, EPSILON = (0.9, 0.999), 1e-8
RANK, ALPHA = 8, 32  # of the adapter
ROUTER = 0.5  # the router loss's coefficient: 50 times the usual one, so that an error in it shows
# fp32 adds in another order: a few units of 2^-24 a sum, through some hundred sums.
# bf16 keeps 8 bits, so each rounding is off by up to 2^-9 = 0.2 %. A padded batch rounds differently from single rows;
# a loss is a mean over hundreds of tokens, a gradient a sum of errors, and Adam's first steps follow a gradient's sign,
# however small it is: the movement of the weights agrees least.
BOUNDS = {
    "fp32": {"loss": 2e-6, "gradient norm": 1e-5, "learning rate": 1e-9, "weights": 1e-4, "eval loss": 2e-6},
    "bf16": {"loss": 2e-3, "gradient norm": 2e-2, "learning rate": 1e-9, "weights": 0.15, "eval loss": 2e-3},
}


@dataclass(frozen=True)
class Case:
    """One run of a recipe. Args: model: a folder below the work folder; micro: rows of a micro batch on a rank."""

    name: str
    ranks: int = 1
    recipe: str = "sft"
    zero: str = "0"
    offload: str = "none"
    precision: str = "fp32"
    model: str = "dense"
    micro: int = 4
    learning_rate: float = LEARNING_RATE

    def flags(self, folder: Path) -> list[str]:
        words = {
            "model": folder / self.model, "data": folder / "train.jsonl", "eval_data": folder / "eval.jsonl",
            "zero": self.zero,
            "offload": self.offload, "bf16": str(self.precision == "bf16").lower(), "seed": SEED, "num_samples": 0,
            "effective_batch_size": BATCH, "per_device_train_batch_size": self.micro, "num_train_epochs": EPOCHS,
            "learning_rate": self.learning_rate, "lr_scheduler_type": "linear", "warmup_steps": WARMUP,
            "weight_decay": DECAY,
            "max_grad_norm": CLIP, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no", "gpus": self.ranks,
            "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_epsilon": EPSILON, "output_dir": folder / self.name,
        }  # fmt: skip
        if self.recipe == "lora":
            words |= {"lora_r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
        return [word for name, value in words.items() for word in (f"--{name}", str(value))]


def all_cases() -> list[Case]:
    """Stages, offload, LoRA and bf16 on 1 and 2 ranks; mixtures of experts in several splits."""
    cases = []
    for ranks in (1, 2):
        for recipe in ("sft", "lora"):
            cases += [Case(f"{recipe}-{zero}-ranks{ranks}", ranks, recipe, zero) for zero in "0123"]
            cases += [Case(f"{recipe}-{z}-bf16-ranks{ranks}", ranks, recipe, z, precision="bf16") for z in "023"]
        for zero, offload in (("2", "optimizer"), ("3", "optimizer"), ("3", "all")):
            cases.append(Case(f"offload-{zero}-{offload}-ranks{ranks}", ranks, "sft", zero, offload))
    for model in ("qwen3_moe", "mixtral"):
        splits = [(1, micro) for micro in (1, 4, 8)] + [(2, micro) for micro in (1, 4)]
        for ranks, micro in splits:
            name = f"experts-{model}-micro{micro}-ranks{ranks}"
            cases.append(Case(name, ranks, zero="0" if ranks == 1 else "2", model=model, micro=micro))
    return cases


# --- what both sides read ---


def prepare(folder: Path) -> None:
    """Write the rows as token lists, the dense model and the mixtures of experts."""
    generator = torch.Generator().manual_seed(SEED)
    for name, count in (("train", ROWS), ("eval", 10)):
        rows = []
        for length in torch.randint(3, 60, (count,), generator=generator).tolist():
            ids = torch.randint(5, 500, (length,), generator=generator).tolist()
            prompt = int(torch.randint(0, length - 1, (1,), generator=generator))
            rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shutil.copytree(machine.TINY_MODEL, folder / "dense")
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "vocab_size": 512, "hidden_size": 48, "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24, "num_experts": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": ROUTER, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    for kind in ("qwen3_moe", "mixtral"):
        torch.manual_seed(SEED)
        net = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        for name, p in net.named_parameters():
            if name.endswith("gate.weight"):
                p.data.mul_(30)  # uneven use of the experts from the start
        net.save_pretrained(folder / kind)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(machine.TINY_MODEL / file, folder / kind / file)


def torchrun(words: list[str], ranks: int, **variables) -> subprocess.CompletedProcess:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.run([sys.executable, *launcher, *words], capture_output=True, text=True, env=variables)


def run_kit(cases: list[Case], folder: Path, launch=torchrun) -> None:
    """Run the recipes, all cases of a rank count in one launch."""
    for ranks in sorted({case.ranks for case in cases}):
        mine = [case for case in cases if case.ranks == ranks]
        file = folder / f"cases-{ranks}.json"
        listed = [{"name": c.name, "recipe": c.recipe, "flags": c.flags(folder)} for c in mine]
        file.write_text(json.dumps(listed))
        variables = machine.environment(str(folder / "cache"), ours=True)
        variables |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        words = [str(machine.ROOT / "benchmarks" / "ledger_world.py"), str(file)]
        done = launch(words, ranks=ranks, **variables)
        failed = [case.name for case in mine if not (folder / case.name / "result.json").exists()]
        if done.returncode or failed:
            said = [file.read_text() for file in folder.glob("*/error.txt")]
            raise SystemExit(f"oracle: no result of {failed}: {said}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


# --- the loop ---


class Adapted(torch.nn.Module):
    """x -> W x + alpha / r B A x, with a frozen W."""

    def __init__(self, base: torch.nn.Linear, a: torch.Tensor):
        super().__init__()
        self.base, self.A = base, torch.nn.Parameter(a.clone())
        self.B = torch.nn.Parameter(torch.zeros(base.out_features, len(a)))

    def forward(self, x):
        return self.base(x) + ALPHA / RANK * linear(linear(x, self.A.to(x.dtype)), self.B.to(x.dtype))


class Oracle:
    """Train as `case` should, on one row at a time."""

    def __init__(self, case: Case, folder: Path):
        from transformers import AutoModelForCausalLM

        self.case, self.folder = case, folder
        bf16 = case.precision == "bf16"
        # Stage 0 keeps fp32 weights and multiplies in bf16 (autocast); the ZeRO stages, and a frozen base, are bf16.
        self.autocast = bf16 and case.zero == "0"
        self.half = bf16 and case.zero != "0"
        frozen_half = bf16 and case.recipe == "lora"
        dtype = torch.bfloat16 if self.half or frozen_half else torch.float32
        self.net = AutoModelForCausalLM.from_pretrained(folder / case.model, dtype=dtype)
        self.net.config.use_cache = False
        if case.recipe == "lora":
            self.adapt()
        trained = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        # The optimizer's fp32 weights; where the model is bf16, each step rounds them into the model.
        self.trained, self.weights = trained, {name: p.detach().float().clone() for name, p in trained.items()}
        self.start = {name: w.clone() for name, w in self.weights.items()}
        self.moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in self.weights.items()}

    def adapt(self) -> None:
        """Give each adapted layer of the kit's run its initial A, as saved by a run at learning rate 0."""
        self.net.requires_grad_(False)
        for name, a in load_file(self.folder / "initial" / "final" / "adapter_model.safetensors").items():
            if not name.endswith("lora_A.weight"):
                continue
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            parent, _, child = path.rpartition(".")
            layer = Adapted(self.net.get_submodule(path), a.float())
            if self.half:
                layer.to(torch.bfloat16)
            setattr(self.net.get_submodule(parent), child, layer)

    def context(self):
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def cross_entropy(self, row: dict, outputs) -> torch.Tensor:
        """Return the sum over the row's supervised tokens."""
        logits, labels = outputs.logits[0, :-1].float(), torch.tensor(row["labels"][1:])
        kept = labels != -100
        chosen = logits[kept].gather(1, labels[kept, None])[:, 0]
        return (torch.logsumexp(logits[kept], -1) - chosen).sum()

    def run(self, row: dict, **more):
        with self.context():
            return self.net(input_ids=torch.tensor([row["input_ids"]]), **more)

    def micro_batch(self, rows: list[dict], tokens: int) -> float:
        """Add the gradient of the micro batch to the parameters and return its part of the step's loss."""
        loss, experts = 0.0, self.case.model != "dense"
        logits, supervised = [], sum(count_supervised(row) for row in rows)
        if not supervised:
            return 0.0
        for row in rows:
            outputs = self.run(row, output_router_logits=True) if experts else self.run(row)
            part = self.cross_entropy(row, outputs) / tokens
            loss += part.item()
            if experts:
                logits.append([layer.float().reshape(-1, layer.shape[-1]) for layer in outputs.router_logits])
            if part.requires_grad and count_supervised(row):
                part.backward(retain_graph=experts)
        if experts:
            part = ROUTER * balance(logits, self.net.config.num_experts_per_tok) * supervised / tokens
            part.backward()
            loss += part.item()
        return loss

    def step(self, number: int, batch: list[dict]) -> tuple[float, float, float]:
        """Make one step and return its (loss, gradient norm, learning rate)."""
        tokens = sum(map(count_supervised, batch))
        micro = self.case.micro
        loss = sum(self.micro_batch(batch[i : i + micro], tokens) for i in range(0, BATCH, micro))
        gradients = {name: p.grad.float() for name, p in self.trained.items() if p.grad is not None}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        clip = min(1.0, CLIP / (norm + 1e-6))
        rate = self.case.learning_rate * min(number / WARMUP, (STEPS - number) / (STEPS - WARMUP))
        with torch.no_grad():
            for name, gradient in gradients.items():
                self.adamw(name, gradient * clip, rate, number + 1)
                self.trained[name].copy_(self.weights[name])
        self.net.zero_grad()
        return loss, norm, rate

    def adamw(self, name: str, gradient: torch.Tensor, rate: float, number: int) -> None:
        weights, (first, second) = self.weights[name], self.moments[name]
        if weights.dim() > 1:  # norms do not decay
            weights.mul_(1 - rate * DECAY)
        first.mul_(BETAS[0]).add_(gradient * (1 - BETAS[0]))
        second.mul_(BETAS[1]).add_(gradient * gradient * (1 - BETAS[1]))
        mean, square = first / (1 - BETAS[0] ** number), second / (1 - BETAS[1] ** number)
        weights.sub_(rate * mean / (square.sqrt() + EPSILON))

    def train(self) -> dict[str, list[float]]:
        """Return {"loss", "gradient norm", "learning rate"} of each step, and the eval loss after them."""
        self.net.train()
        rows, lines = read(self.folder / "train.jsonl"), []
        filler = {"input_ids": [1, 1], "labels": [-100, -100]}  # not padding (0); counts in the router's statistics
        for epoch in range(EPOCHS):
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
            for at in range(0, ROWS, BATCH):
                batch = [rows[i] for i in order[at : at + BATCH]]
                lines.append(self.step(len(lines), batch + [filler] * (BATCH - len(batch))))
        found = dict(zip(("loss", "gradient norm", "learning rate"), map(list, zip(*lines, strict=True)), strict=True))
        held_out = read(self.folder / "eval.jsonl")
        with torch.no_grad():
            total = sum(float(self.cross_entropy(row, self.run(row))) for row in held_out)
        return found | {"eval loss": [total / sum(map(count_supervised, held_out))]}


def balance(logits: list[list[torch.Tensor]], top: int) -> torch.Tensor:
    """Return the load-balancing loss (arXiv 2101.03961, equations 4 to 6).

    router_logits: by row and layer, of shape (tokens, experts).
    """
    flat = torch.cat([layer for row in logits for layer in row])
    probabilities = flat.softmax(-1)
    used = torch.zeros_like(flat).scatter(1, probabilities.topk(top).indices, 1.0)
    return flat.shape[1] * (used.mean(0) * probabilities.mean(0)).sum()


def count_supervised(row: dict) -> int:
    return sum(label != -100 for label in row["labels"][1:])


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# --- the comparison ---


def saved_weights(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """The kit's final weights under the loop's names."""
    final = folder / case.name / "final"
    if case.recipe == "sft":
        from transformers import AutoModelForCausalLM

        net = AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
        return {name: w.detach() for name, w in net.named_parameters()}
    found = load_file(final / "adapter_model.safetensors")
    rename = {".lora_A.weight": ".A", ".lora_B.weight": ".B"}
    return {
        name.removeprefix("base_model.model.").replace(old, new): w.float()
        for name, w in found.items()
        for old, new in rename.items()
        if name.endswith(old)
    }


def compare(case: Case, folder: Path, oracle: Oracle, wanted: dict[str, list[float]]) -> dict[str, float]:
    """Return the largest relative difference of each quantity; of the weights, of their movement from start to end."""
    lines = [line for line in read(folder / case.name / "metrics.jsonl") if "loss" in line]
    result = json.loads((folder / case.name / "result.json").read_text())
    found = {name: [line[key] for line in lines] for name, key in
             (("loss", "loss"), ("gradient norm", "grad_norm"), ("learning rate", "learning_rate"))}  # fmt: skip
    found["eval loss"] = [result["eval_loss"]]
    apart = {}
    for name, values in wanted.items():
        pairs = zip(found[name], values, strict=True)
        apart[name] = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
    weights = saved_weights(case, folder)
    if oracle.weights.keys() != weights.keys():
        raise SystemExit(f"oracle: {case.name}: other weights: {sorted(oracle.weights.keys() ^ weights.keys())[:5]}")
    off = sum(float((weights[n] - w).square().sum()) for n, w in oracle.weights.items())
    moved = sum(float((oracle.start[n] - w).square().sum()) for n, w in oracle.weights.items())
    return apart | {"weights": math.sqrt(off / moved)}


def largest_differences(cases: list[Case], folder: Path, launch=torchrun) -> dict[str, dict[str, float]]:
    """Run both sides and return {case's name: {quantity: largest relative difference}}.

    Args: launch: starts `python words` on `ranks` ranks with these variables and returns the CompletedProcess.
    """
    prepare(folder)
    initial = [Case("initial", recipe="lora", learning_rate=0.0)] if any(c.recipe == "lora" for c in cases) else []
    run_kit(initial + cases, folder, launch)
    torch.set_num_threads(1)  # the tensors are small
    done: dict[tuple, tuple] = {}  # the loop has no stages, ranks or offload: one training serves many cases
    found = {}
    for case in cases:
        experts, bf16 = case.model != "dense", case.precision == "bf16"
        key = (
            case.recipe,
            case.model,
            case.precision,
            case.zero == "0" if bf16 else None,
            case.micro if experts else None,
        )
        if key not in done:
            oracle = Oracle(case, folder)
            done[key] = oracle, oracle.train()
        found[case.name] = compare(case, folder, *done[key])
    return found


def beyond(cases: list[Case], found: dict[str, dict[str, float]]) -> list[str]:
    """Return sentences about values beyond their bound; NaN counts as beyond."""
    return [
        f"{case.name}: {name} is off by {found[case.name][name]:.1e}, the bound is {bound:.2g}"
        for case in cases
        for name, bound in BOUNDS[case.precision].items()
        if not found[case.name][name] <= bound
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], help="words of which a case's name must hold one")
    options = parser.parse_args()
    cases = [case for case in all_cases() if any(word in case.name for word in options.only)]
    if not cases:
        parser.error(f"no case has one of the words {options.only} in its name")
    about = machine.facts()
    with tempfile.TemporaryDirectory() as folder:
        found = largest_differences(cases, Path(folder))
    names = list(BOUNDS["fp32"])
    lines = ["# Recipes beside an independent loop", "", *machine.describe(about, {"zerofit": machine.versions()}), ""]
    lines += [f"| {' | '.join(['largest relative difference', *names])} |", f"|{'---|' * (len(names) + 1)}"]
    for case in cases:
        lines.append(f"| {' | '.join([case.name, *(f'{found[case.name][name]:.1e}' for name in names)])} |")
    for precision, bounds in BOUNDS.items():
        lines.append(f"| {' | '.join([f'bound, {precision}', *(f'{bounds[name]:.2g}' for name in names)])} |")
    if options.only == [""]:
        machine.save("oracle", lines, {"machine": about, "differences": found})
    else:
        print("\n".join(lines))
    for sentence in (wrong := beyond(cases, found)):
        print(f"oracle: {sentence}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
