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
from zerofit.job import groups, program, run_folder
from zerofit.job.recipe import NAME
from zerofit.model import adapters
from zerofit.model.load import load_model, load_tokenizer, weight_dtype
from zerofit.train import nan_guard

NOT_REPEATED = ("--push_to_hub", "--upload_to", "--report_to", "--offload_path")  # of the run's flags


def main(argv: list[str]) -> None:
    """Run `zerofit replay`; see --help. Exit with code 4 if something is not finite again, else with 0."""
    parser = argparse.ArgumentParser(prog="zerofit replay", allow_abbrev=False, description=__doc__)
    parser.add_argument("folder", help="runs/<run>/nan/step-<n>, or the run folder for its last one")
    parser.add_argument("--model", default="", help="weights to use instead of those that were kept")
    parser.add_argument("--recipe", default="", help="the recipe's file (default: the one that you started there)")
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's Python code")
    args = parser.parse_args(argv)
    folder = _folder(Path(args.folder).expanduser())
    try:
        facts = nan_guard.read(folder)
    except ValueError as error:
        raise UserError(f"{folder}: is no kept step ({error}); name a nan/step-<n> of a run folder.") from None
    started = _program(facts, folder, args)
    settings, autocast_dtype = _settings(facts, folder, args.model)
    trainer = _trainer(settings, folder, args.model, started)
    weights_note = "" if args.model or (folder / "model").is_dir() else " (the run's first ones; --model names others)"
    was = facts.get("precision", settings.precision)  # a --deepspeed file is read as it is now, and so is the device
    where = f"{settings.precision}{f' (trained in {was})' * (was != settings.precision)} on {trainer.model.device}"
    print(f"replay of {folder}: {where}, weights of {settings.model}{weights_note}", flush=True)
    bad_batches = 0
    for rank in range(facts["world_size"]):
        for index, batch in enumerate(_batches(folder / f"rank{rank}.safetensors")):
            rows = facts["rows"][rank][index] if facts["rows"] else []
            seen = _look(trainer, batch, autocast_dtype)
            bad_batches += _say(f"rank {rank} micro batch {index}", seen, rows, facts["texts"])
    if not bad_batches:
        print("all is finite here: the fault was of that moment (a device, a rank, a precision), or of other weights")
    raise SystemExit(EXIT_CODES["diverged"] if bad_batches else 0)


def _folder(given: Path) -> Path:
    if (given / "step.json").exists():
        return given
    steps = run_folder.by_step(given / "nan", "step")
    if not steps:
        raise UserError(f"{given}: holds no nan/step-<n>; that run has met no step without a finite gradient.")
    return steps[max(steps)]


def _program(facts: dict, folder: Path, args) -> program.Program:
    """Return the program that trained the step, as this user has started or named it, and check its flags.

    Raises: UserError for flags that run code of a run that this user has not started, and for a damaged step.json.
    """
    facts = facts if isinstance(facts, dict) else {}
    flags, name, run = facts.get("flags"), facts.get("recipe"), folder.resolve().parent.parent
    is_name = type(name) is str and NAME.fullmatch(name) is not None
    if not is_name or not isinstance(flags, list) or any(type(f) is not str for f in flags):
        raise UserError(f"{folder}: its step.json is damaged; name another nan/step-<n> of a run folder.")
    kept = run_folder.read_json(folder / "step.json")
    older = "program" not in kept  # of a zerofit that wrote it into run.json alone
    said = program.said_by(run_folder.read_json(run / "run.json") if older else kept)
    started = program.of_run(run, name, said, args.recipe)
    given = ["--trust_remote_code", "true"] if args.trust_remote_code else []
    flags = command_line.drop(flags, *NOT_REPEATED)
    parse.refuse_foreign(started.recipe, flags, given, run)
    facts["flags"] = [*flags, *given]
    return started


def _settings(facts: dict, folder: Path, model: str):
    """Return (the run's settings for one process without DeepSpeed, with the run's weight dtype; autocast's dtype).

    The second is None where nothing is cast: in fp32, with --pure_bf16, and under DeepSpeed, which computes in the
    weights' type.
    """
    settings = resolve.resolve_settings(facts["recipe"], facts["flags"], facts["world_size"])
    casts = settings.deepspeed is None and not settings.pure_bf16
    autocast_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.precision) if casts else None
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


def _trainer(settings, folder: Path, named: str, started: program.Program):
    """Return the recipe's trainer, for one process, of the model as the run built it, in training mode."""
    from datasets import Dataset

    from zerofit.train.trainer import ZerofitTrainer, training_arguments

    tokenizer = load_tokenizer(settings)
    resolve.resolve_for_model(settings)
    model = load_model(settings, tokenizer, accept_nan=True)
    if settings.trains_adapter:
        model = adapters.add_adapter(model, settings, tokenizer)
        adapter_file = Path(named or folder / "model") / "adapter_model.safetensors"
        if adapter_file.exists():
            set_peft_model_state_dict(model, load_file(adapter_file))
    whole_rows = {way.flag: 1 for way, _ in groups.in_use(settings.values)}
    nothing_else = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False, "push_to_hub": False}
    settings = settings.replace(
        world_size=1, ddp_backend=None, output_dir=tempfile.gettempdir(), report_to=[], **nothing_else, **whole_rows
    )
    # One process has no stages.
    kind = ZerofitTrainer if settings.recipe.stages else program.trainer(settings.recipe, started.file)
    rows = TokenizedDataset(Dataset.from_list([{"input_ids": [0], "labels": [0], "lengths": [1]}]), {}, "replay")
    trainer = kind(settings, model, tokenizer, training_arguments(settings), rows, None)
    trainer.model.train()
    return trainer


def _batches(file: Path) -> list[dict]:
    if not file.exists():
        raise UserError(f"{file}: is missing; copy the whole folder of the step, with the files of all ranks.")
    batches: dict[int, dict] = {}
    for key, tensor in load_file(file).items():
        index, name = key.split(".", 1)
        batches.setdefault(int(index), {})[name] = tensor.item() if tensor.dim() == 0 else tensor
    return [batches[i] for i in sorted(batches)]


def _look(trainer, batch: dict, autocast_dtype) -> dict:
    """Return {"loss", "module": first with a non-finite output, "gradients": non-finite ones' names}."""
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


def _say(where: str, seen: dict, rows: list[int], texts: dict) -> bool:
    """Print one micro batch; return whether its loss or a gradient is not finite."""
    bad = not math.isfinite(seen["loss"]) or seen["gradients"]
    print(f"{where}: loss {seen['loss']:.4f}, " + ("gradient finite" if not seen["gradients"] else
          f"gradient not finite in {len(seen['gradients'])} parameters, e.g. {seen['gradients'][-1]}"))  # fmt: skip
    if seen["module"]:
        print(f"  the first output that is not finite: {seen['module']}")
    if bad:
        for row in rows:
            print(f"  row {row}: {texts.get(str(row), '')!r}")
    return bool(bad)
