"""`zerofit replay`: repeat a non-finite step in one process, module by module.

Reads what nan_guard.NanGuard saved: each rank's micro batches, and the weights if the run was stopped.
"""

import argparse
import contextlib
import math
import tempfile
from pathlib import Path

import torch
from accelerate.utils import send_to_device
from peft import set_peft_model_state_dict
from safetensors.torch import load_file

from zerofit.base import command_line
from zerofit.base.errors import EXIT_CODES, UserError
from zerofit.config import parse, resolve
from zerofit.data.tokens import TokenizedDataset
from zerofit.job import parallel_dims, program, run_folder
from zerofit.job.recipe import NAME
from zerofit.model import adapters
from zerofit.model.load import DTYPES, load_model, load_tokenizer, weight_dtype
from zerofit.train import nan_guard

DROPPED_FLAGS = ("--push_to_hub", "--upload_to", "--report_to", "--offload_path")


def main(argv: list[str]) -> None:
    """Run `zerofit replay`; see --help. Exit with code 4 if something is not finite again, else with 0."""
    parser = argparse.ArgumentParser(prog="zerofit replay", allow_abbrev=False, description=__doc__)
    parser.add_argument("folder", help="runs/<run>/nan/step-<n>, or the run folder for its last saved step")
    parser.add_argument("--model", default="", help="weights to use instead of the saved ones")
    parser.add_argument("--recipe", default="", help="the recipe's file (default: the run's recipe)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's Python code")
    args = parser.parse_args(argv)
    folder = _folder(Path(args.folder).expanduser())
    try:
        facts = nan_guard.read(folder)
    except ValueError as error:
        raise UserError(f"{folder}: not a saved step ({error}); name a nan/step-<n> of a run folder.") from None
    started = _program(facts, folder, args)
    settings, autocast_dtype = _settings(facts, folder, args.model)
    trainer = _trainer(settings, folder, args.model, started)
    weights_note = "" if args.model or (folder / "model").is_dir() else " (initial weights; --model selects others)"
    was = facts.get("precision", settings.precision)  # the --deepspeed file or the device may have changed since
    where = f"{settings.precision}{f' (trained in {was})' * (was != settings.precision)} on {trainer.model.device}"
    print(f"replay of {folder}: {where}, weights of {settings.model}{weights_note}", flush=True)
    bad_batches = 0
    for rank in range(facts["world_size"]):
        for index, batch in enumerate(_batches(folder / f"rank{rank}.safetensors")):
            rows = facts["rows"][rank][index] if facts["rows"] else []
            result = _run_batch(trainer, batch, autocast_dtype)
            bad_batches += _print_result(f"rank {rank} micro batch {index}", result, rows, facts["texts"])
    if not bad_batches:
        print("everything is finite in this replay: the device, the precision or the weights differ from the run")
    raise SystemExit(EXIT_CODES["diverged"] if bad_batches else 0)


def _folder(folder: Path) -> Path:
    if (folder / "step.json").exists():
        return folder
    steps = run_folder.by_step(folder / "nan", "step")
    if not steps:
        raise UserError(f"{folder}: does not contain nan/step-<n>; all gradients of that run were finite.")
    return steps[max(steps)]


def _program(facts: dict, folder: Path, args) -> program.Program:
    """Return the program that trained the step, and check its flags.

    Raises: UserError for flags that run code of another user's run, and for a damaged step.json.
    """
    facts = facts if isinstance(facts, dict) else {}
    flags, name, run = facts.get("flags"), facts.get("recipe"), folder.resolve().parent.parent
    is_name = type(name) is str and NAME.fullmatch(name) is not None
    if not is_name or not isinstance(flags, list) or any(type(f) is not str for f in flags):
        raise UserError(f"{folder}: its step.json is damaged; name another nan/step-<n> of a run folder.")
    step = run_folder.read_json(folder / "step.json")
    older = "program" not in step  # older versions of zerofit wrote it only into run.json
    recorded = program.recorded_program(run_folder.read_json(run / "run.json") if older else step)
    started = program.for_run(run, name, recorded, args.recipe)
    extra_flags = ["--trust_remote_code", "true"] if args.trust_remote_code else []
    flags = command_line.drop(flags, *DROPPED_FLAGS)
    parse.refuse_foreign(started.recipe, flags, extra_flags, run)
    facts["flags"] = [*flags, *extra_flags]
    return started


def _settings(facts: dict, folder: Path, model: str):
    """Return (the run's settings for one process without DeepSpeed, autocast's dtype or None).

    Runs in fp32, with --pure_bf16 or with DeepSpeed do not use autocast.
    """
    settings = resolve.resolve_settings(facts["recipe"], facts["flags"], facts["world_size"])
    casts = settings.deepspeed is None and not settings.pure_bf16
    autocast_dtype = DTYPES[settings.precision] if casts and settings.precision != "fp32" else None
    settings = settings.replace(
        deepspeed=None,
        dtype=weight_dtype(settings),
        zero=0,
        offload="none",
        use_cpu=not torch.cuda.is_available(),
    )
    weights = Path(model) if model else folder / "model"
    if not settings.trains_adapter and (model or weights.is_dir()):
        settings = settings.replace(model=str(weights), random_init=False, new_tokens=None)
    return settings, autocast_dtype


def _trainer(settings, folder: Path, weights: str, started: program.Program):
    """Return the recipe's trainer for one process, with the run's model in training mode."""
    from datasets import Dataset

    from zerofit.train.trainer import ZerofitTrainer, training_arguments

    tokenizer = load_tokenizer(settings)
    resolve.resolve_for_model(settings)
    model = load_model(settings, tokenizer, accept_nan=True)
    if settings.trains_adapter:
        model = adapters.add_adapter(model, settings, tokenizer)
        adapter_file = Path(weights or folder / "model") / "adapter_model.safetensors"
        if adapter_file.exists():
            set_peft_model_state_dict(model, load_file(adapter_file))
    unsplit_rows = {way.flag: 1 for way, _ in parallel_dims.active(settings.values)}
    nothing_else = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False}
    settings = settings.replace(
        world_size=1, ddp_backend=None, output_dir=tempfile.gettempdir(), report_to=[], **nothing_else, **unsplit_rows
    )
    # A single process does not run pipeline stages.
    kind = ZerofitTrainer if settings.recipe.stages else program.trainer(settings.recipe, started.file)
    rows = TokenizedDataset(Dataset.from_list([{"input_ids": [0], "labels": [0], "lengths": [1]}]), {}, "replay")
    trainer = kind(settings, model, tokenizer, training_arguments(settings), rows, None)
    trainer.model.train()
    return trainer


def _batches(file: Path) -> list[dict]:
    if not file.exists():
        raise UserError(f"{file}: is missing; copy the step's folder with the files of all ranks.")
    batches: dict[int, dict] = {}
    for key, tensor in load_file(file).items():
        index, name = key.split(".", 1)
        batches.setdefault(int(index), {})[name] = tensor.item() if tensor.dim() == 0 else tensor
    return [batches[i] for i in sorted(batches)]


def _run_batch(trainer, batch: dict, autocast_dtype) -> dict:
    """Return {"loss", "module": first with a non-finite output, "gradients": names of non-finite gradients}."""
    net, first = trainer.model, []

    def watch(name):
        def hook(module, inputs, output):
            tensors = [t for t in (output if isinstance(output, tuple) else [output]) if isinstance(t, torch.Tensor)]
            if not first and any(t.is_floating_point() and not t.isfinite().all() for t in tensors):
                first.append(name)

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in net.named_modules() if name]
    inputs = send_to_device(batch, net.device)
    with torch.autocast(net.device.type, autocast_dtype) if autocast_dtype else contextlib.nullcontext():
        loss = _mean_loss(trainer, inputs)
    loss.backward()
    for hook in hooks:
        hook.remove()
    nonfinite = [n for n, p in net.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    net.zero_grad()
    return {"loss": loss.item(), "module": first[0] if first else None, "gradients": nonfinite}


def _mean_loss(trainer, inputs: dict):
    """Return the trainer's loss as a mean over the micro batch's tokens or pairs."""
    count = trainer.objective.items([inputs], inputs["labels"].device)
    count = None if count is None else count.clamp(min=1)
    return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count)


def _print_result(where: str, result: dict, rows: list[int], texts: dict) -> bool:
    """Print one micro batch; return whether its loss or a gradient is not finite."""
    bad = not math.isfinite(result["loss"]) or result["gradients"]
    print(f"{where}: loss {result['loss']:.4f}, " + ("gradient finite" if not result["gradients"] else
          f"gradient not finite in {len(result['gradients'])} parameters, e.g. {result['gradients'][-1]}"))  # fmt: skip
    if result["module"]:
        print(f"  first non-finite output: {result['module']}")
    if bad:
        for row in rows:
            print(f"  row {row}: {texts.get(str(row), '')!r}")
    return bool(bad)
