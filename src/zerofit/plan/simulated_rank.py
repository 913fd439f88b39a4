"""Run one rank of a job on tensors without storage: the real trainer and the real engine."""

import contextlib
import gc
import json
import os
import runpy
import signal
import sys
import tempfile
from pathlib import Path

from zerofit.base import distributed, process
from zerofit.base.errors import UserError
from zerofit.job import program
from zerofit.optim import registry
from zerofit.plan import caching_allocator, fake_device, gpu_memory, simulate

# --- answers, in a separate process ---


def main(_: list[str]) -> None:
    with process.importing():  # once, for all forks
        import deepspeed  # noqa: F401
        import transformers  # noqa: F401

        from zerofit.model import load  # noqa: F401
        from zerofit.plan import fake_operations  # noqa: F401
        from zerofit.train import trainer  # noqa: F401
    for line in sys.stdin:
        questions = [simulate.Question.from_json(plain) for plain in json.loads(line)]
        if questions[0].device == "cuda":  # `run_all` sends these questions one by one
            _answer_and_end(0, questions[0])
        _answer_in_forks(questions)
        os.write(1, f"\n{simulate.ALL_ANSWERED}\n".encode())


def _answer_in_forks(questions: list[simulate.Question]) -> None:
    """Answer each question in a fork of this process, one per core in parallel."""
    import torch

    # Real tensors use all cores, so only a single question runs.
    workers = distributed.cores() if all(q.fake for q in questions) else 1
    _import_for(questions)
    pending, running = list(enumerate(questions)), {}
    while pending or running:
        while pending and len(running) < workers:
            number, question = pending.pop(0)
            pid = os.fork()
            if not pid:
                # This comes first, in a single thread: torch replaces its thread pool in a fork, and two threads that
                # do it in parallel crash (torch 2.15: "Invalid thread pool!").
                torch.set_num_threads(1 if question.fake else distributed.cores())
                _answer_and_end(number, question)
            running[pid] = number
        pid, status = os.wait()
        number = running.pop(pid)
        if status:
            reason = f"ended with exit code {os.waitstatus_to_exitcode(status)}"
            if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                reason = "was killed, most likely because this machine ran out of memory"
            _print_answer([number, {"failed": f"the simulation's process {reason}"}])


def _import_for(questions: list[simulate.Question]) -> None:
    """Import peft and bitsandbytes, if the job uses them, once for all forks: each takes over a second."""
    from zerofit.config import parse

    with contextlib.suppress(UserError):  # the answer reports it
        first = questions[0]
        settings = parse.settings_of(first.request, first.ranks)
        if settings.trains_adapter:
            import peft  # noqa: F401
        module = getattr(registry.spec_of(settings), "module", None)
        if module == "bitsandbytes" or settings.values.get("load_in_4bit"):
            import bitsandbytes

            bitsandbytes.optim  # noqa: B018  (model/patches.py loads the rest with an attribute)


def _print_answer(answer: list) -> None:
    os.write(1, f"\n{simulate.ANSWER_MARK}{json.dumps(answer)}\n".encode())


def _answer_and_end(number: int, question: simulate.Question) -> None:
    """Answer in this process and exit without cleanup: fake groups and engines have nothing to save."""
    try:
        _print_answer([number, _answer(question)])
    except UserError as error:
        _print_answer([number, {"mistake": str(error)}])
    except simulate.SimulationFailed as error:
        _print_answer([number, {"failed": str(error)}])
    except BaseException as error:
        import traceback

        message = f"the recipe {question.program[0]}: {type(error).__name__}: {error}" if question.program else None
        _print_answer([number, {"failed": message} if message else {"trace": traceback.format_exc()}])
    finally:
        sys.stdout.flush()
        os._exit(0)


def _answer(question: simulate.Question) -> dict:
    """Train two steps as a rank of the job; return the answer for `simulate.run_all`."""
    import time

    began = time.perf_counter()
    os.environ |= {"LOCAL_WORLD_SIZE": str(question.ranks)}
    from zerofit.config import resolve
    from zerofit.model import load
    from zerofit.train import memory_tracker

    settings = _nvme_in_host_memory(resolve.resolve(question.request, question.ranks, question.gpu))
    config = load.load_config(settings)
    config.get_text_config().update(question.overrides)
    resolve.resolve_for_model(settings, config)  # before TrainingArguments, which copy the DeepSpeed JSON
    on_gpu = question.device == "gpu"
    sizes = {"round_to": 1 if question.device == "cpu" else 512, "followed_steps": sys.maxsize}
    tracker = memory_tracker.MemoryTracker(device=question.device, keep_events=on_gpu, **sizes)
    if on_gpu:
        overlaps = bool((settings.deepspeed or {}).get("zero_optimization", {}).get("overlap_comm"))
        fake_device.register_gpu(tracker, int(question.gpu.memory_gib * 2**30), overlaps)
    _join_group(settings, question.rank)
    settings, arguments, *rows = _trainer_inputs(settings, question)
    fake_device.disable_inference_mode()
    with contextlib.ExitStack() as stack:
        if question.fake:
            fake_device.fake_adam()
            fake_device.stub_muon(settings)
            fake_device.skip_triton_kernels()
            fake_device.patch_value_branches(question.padded, settings.max_length)
            tracker.watch = _fake_operations(stack, _rows_by_tokens(settings)).followed
        elif settings.compile_layers:
            _follow_compiled_layers(tracker)
        host_tracker = tracker
        if on_gpu:  # tensors in host memory have a separate tracker
            host_tracker = memory_tracker.MemoryTracker(device="cpu")
            host_tracker.phase = "step"
            stack.enter_context(tracker.watch(host_tracker))
        stack.enter_context(tracker)
        with _without_collections():
            trainer = _trainer(settings, arguments, rows, config, question)
        for hook in question.before_training:
            file, _, function = hook.rpartition(":")
            runpy.run_path(file)[function](trainer)
        trainer.train()
        host_bytes = host_tracker.highest if on_gpu else tracker.host
        _evaluate_and_save(trainer, tracker)
        tracker.pause()
        answer = _measured(trainer, tracker) | {"host": host_bytes, "host_saving": 0, "allocator": None}
        if on_gpu:
            expandable = question.expandable_segments
            capacity = gpu_memory.allocator_capacity(question.gpu, question.ranks)
            answer["host_saving"] = max(0, host_tracker.highest - host_bytes)
            answer["allocator"] = caching_allocator.required_bytes(tracker.events, expandable, capacity)
        return answer | {"seconds": round(time.perf_counter() - began, 2)}


def _measured(trainer, tracker) -> dict:
    """Return the part of the answer with the peaks and the size of the trained model."""
    from zerofit.model import quantization

    settings = trainer.settings
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in trainer.model.parameters()]
    return {
        "peak": tracker.peak,
        "total": {phase: sum(parts.values()) for phase, parts in tracker.peak.items()},
        "model_states": tracker.model_states,
        "parameters": sum(n for n, _ in sizes),
        "whole_parameters": quantization.bits(settings) is None and settings.parallel_size("matrices") == 1,
        "trainable": sum(n for n, trained in sizes if trained),
    }


def _nvme_in_host_memory(settings):
    """Return the settings with host memory in place of an offload disk, which takes the same bytes on a GPU.

    With a disk, DeepSpeed would compile its swapper and write.
    """
    from zerofit.config import nvme

    sections = nvme.paths_of(settings.deepspeed)
    if not sections:
        return settings
    zero = {**settings.deepspeed["zero_optimization"]}
    for name in sections:
        zero[name] = {key: value for key, value in zero[name].items() if key != "nvme_path"} | {"device": "cpu"}
    return settings.replace(deepspeed={**settings.deepspeed, "zero_optimization": zero}, offload_path=None)


def _rows_by_tokens(settings) -> dict[int, int]:
    """Return {tokens: rows} of training and evaluation batches; {} for slices of rows, in which all labels count."""
    if settings.parallel_size("tokens") > 1:
        return {}
    sizes = (settings.per_device_train_batch_size, settings.per_device_eval_batch_size)
    rows = [size * settings.objective.documents for size in sizes]
    return {count * settings.max_length: count for count in rows}


@contextlib.contextmanager
def _without_collections():
    """Collect garbage only at the end of the body, so that tensors in cycles are always released at the same point."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def _join_group(settings, rank: int) -> None:
    """Initialize torch's fake process group, whose collectives send nothing, with the variables of a launcher.

    A single rank without DeepSpeed needs neither.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if settings.deepspeed is None and settings.world_size == 1:
        return
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.world_size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=settings.world_size)
    if settings.deepspeed is None:
        return
    import deepspeed
    import deepspeed.comm

    fake_device.fake_other_ranks()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


class _Tokenizer:
    """The attributes of a tokenizer that the trainer reads; a plan needs no tokenizer files."""

    pad_token_id, padding_side = 0, "right"

    def __len__(self) -> int:
        return 0


def _evaluate_and_save(trainer, tracker) -> None:
    """Run an evaluation batch, if the run evaluates, and gather sharded or split weights as for a save."""
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    settings = trainer.settings
    if settings.deepspeed is None or (settings.zero != 3 and settings.parallel_size("matrices") == 1):
        return
    with tracker.during("save"):  # as Trainer.save_model does
        if settings.zero == 3:
            trainer.deepspeed._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=settings.trains_adapter)
        else:
            trainer.deepspeed._consolidated_16bit_state_dict()


def _trainer_inputs(settings, question: simulate.Question):
    """Return (Settings, TrainingArguments, tokenizer, rows, eval rows or None) for steps that do not write files."""
    import torch

    from zerofit.train.trainer import training_arguments

    device = question.device
    settings = _limit_steps(settings, question)
    arguments = training_arguments(settings)
    if device != "cuda":
        fake_device.set_device(arguments, torch.device("gpu:0" if device == "gpu" else "cpu"))
    train_rows = _rows(settings, settings.effective_batch_size * simulate.STEPS)
    evaluates = settings.eval_data or settings.eval_fraction
    eval_rows = _rows(settings, settings.per_device_eval_batch_size * settings.data_ranks) if evaluates else None
    return settings, arguments, _Tokenizer(), train_rows, eval_rows


def _rows(settings, count: int):
    """Return a dataset of `count` rows of --max_length tokens; a row of preferences has two documents."""
    from datasets import Dataset

    from zerofit.data.tokens import TokenizedDataset

    documents, width = settings.objective.documents, settings.max_length
    row = {name: [5] * width * documents for name in ("input_ids", "labels")}
    row |= {"lengths": [width] * documents} if documents > 1 else {}
    return TokenizedDataset(Dataset.from_list([row]).select([0] * count), {}, "simulated")


def _limit_steps(settings, question: simulate.Question):
    """Return the Settings of the simulated steps, which do not write files."""
    from zerofit.config import resolve

    # The second micro batch of a step allocates like all later ones.
    accumulation = min(settings.gradient_accumulation_steps, 2)
    batch = settings.per_device_train_batch_size * accumulation * settings.data_ranks
    changes = {
        "max_steps": simulate.STEPS,
        "train_sampling_strategy": "sequential",
        "packing": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "report_to": [],
        "push_to_hub": False,
        "logging_steps": 10**6,
        "random_init": True,
        "gradient_accumulation_steps": accumulation,
        "effective_batch_size": batch,
        "seed": 0,
        "output_dir": str(Path(tempfile.gettempdir()) / "zerofit-simulation"),
        "dataloader_num_workers": 0,
        "dataloader_persistent_workers": False,
        "dataloader_prefetch_factor": None,
        "resume_from_checkpoint": None,
        "load_best_model_at_end": False,
    }
    for technique in resolve.techniques_of(settings):
        changes |= technique.simulated(settings, question)
    if settings.fp16 and settings.deepspeed is None:
        changes |= {"fp16": False, "bf16": True}  # the same bytes; accelerate's fp16 does not support device "gpu"
    if settings.deepspeed is not None:
        sizes = {"gradient_accumulation_steps": accumulation, "train_batch_size": batch}
        literal = {k: v for k, v in sizes.items() if settings.deepspeed.get(k) not in (None, "auto")}
        changes["deepspeed"] = settings.deepspeed | literal
    if question.device != "cuda":
        changes |= {"use_cpu": True, "dataloader_pin_memory": False, "ddp_backend": None}
    return settings.replace(**changes)


def _fake_operations(stack, rows: dict[int, int]):
    """Enter torch's FakeTensorMode and a FakeOperations mode above it on the stack; return the latter."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.plan.fake_operations import FakeOperations

    fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    return stack.enter_context(FakeOperations(fake, rows))


def _follow_compiled_layers(tracker) -> None:
    """Allow torch to compile under the tracker, and pass the outputs of compiled kernels to it."""
    import torch

    from zerofit.train.memory_tracker import Watch

    class WatchAround(Watch):
        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

    guards = torch._C._dynamo.guards
    allocate = guards._empty_strided_cpu

    def allocate_followed(*args):
        tensor = allocate(*args)
        if tracker.following:
            tracker.see(tensor)
        return tensor

    tracker.watch, guards._empty_strided_cpu = WatchAround, allocate_followed  # generated code does not call operations


def _trainer(settings, arguments, rows, config, question: simulate.Question):
    """Return the trainer and model as the recipe builds them. rows: tokenizer, training and eval rows."""
    import torch
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from zerofit.certificate import recorder
    from zerofit.model import adapters, attention, load, quantization
    from zerofit.train import progress

    on_gpu, fake = question.device == "gpu", question.fake
    device = "gpu:0" if on_gpu else "cpu"
    if on_gpu:
        one_by_one = attention.why_one_by_one(settings.replace(use_cpu=False), config) is not None
        fake_device.register_attention(settings.attn_implementation, one_by_one)
    device_context = torch.device(device) if on_gpu else contextlib.nullcontext()
    tokenizer, train_rows, eval_rows = rows
    bits = quantization.bits(settings)
    if bits == 8 and fake:
        raise simulate.SimulationFailed("a base in 8 bits cannot be simulated")
    settings = settings.replace(random_init=bits is None or fake)
    if bits and fake:
        unset_hf_deepspeed_config()  # the engine shards packed weights after they are loaded
        with torch.device("meta"):
            # Loading in 4 bits would read the weights.
            model = load.load_model(settings.replace(load_in_4bit=False), tokenizer, config)
        fake_device.quantize(model, device)
    with device_context:
        if not (bits and fake):
            model = load.load_model(settings, tokenizer, config)
        if settings.trains_adapter:
            model = adapters.add_adapter(model, settings)
    # Without use_cpu, activations are offloaded from the fake GPU.
    settings = settings.replace(use_cpu=settings.use_cpu and not on_gpu)

    class SimulatedTrainer(_trainer_of(settings.recipe, question.program[0] if question.program else None)):
        def fuse_loss(self, net):
            with fake_device.real_tensors() if fake else contextlib.nullcontext():  # it computes logits for a check
                return super().fuse_loss(net)

        def counting(self, collate):
            return collate  # the values of labels are not set

    trainer = SimulatedTrainer(settings, model, tokenizer, arguments, train_rows, eval_rows)
    for callback in (progress.Reporter, recorder.Recorder):
        trainer.remove_callback(callback)
    return trainer


def _trainer_of(recipe, file: str | None) -> type:
    """Return the trainer of a recipe. file: of a custom recipe. Raises: SimulationFailed if it is not found."""
    try:
        return program.trainer(recipe, Path(file) if file else None)
    except UserError as error:
        raise simulate.SimulationFailed(str(error).rstrip(".")) from None
