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

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.job import program
from zerofit.optim import registry
from zerofit.plan import caching_allocator, fake_device, gpu_memory, simulate

# --- the answer, in a process of its own ---


def main(_: list[str]) -> None:
    import deepspeed  # noqa: F401  (once, for all forks)
    import transformers  # noqa: F401

    from zerofit.model import load  # noqa: F401
    from zerofit.plan import fake_operations  # noqa: F401
    from zerofit.train import trainer  # noqa: F401

    gc.freeze()  # the libraries' objects: no collection of a fork scans them
    for line in sys.stdin:
        questions = [simulate.Question.from_json(plain) for plain in json.loads(line)]
        if questions[0].device == "cuda":  # run_all sends such a question alone
            _answer_and_end(0, questions[0])
        _answer_in_forks(questions)
        os.write(1, f"\n{simulate.DONE}\n".encode())


def _answer_in_forks(questions: list[simulate.Question]) -> None:
    """Answer each question in a fork of this process, as many in parallel as there are cores."""
    import torch

    # Real tensors use all cores, so one question at a time.
    workers = distributed.cores() if all(q.fake for q in questions) else 1
    _import_for(questions)
    waiting, running = list(enumerate(questions)), {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, question = waiting.pop(0)
            pid = os.fork()
            if not pid:
                # First of all, by one thread: torch replaces its thread pool in a fork, and two threads that do it at
                # once end the process (torch 2.15: "Invalid thread pool!").
                torch.set_num_threads(1 if question.fake else distributed.cores())
                _answer_and_end(number, question)
            running[pid] = number
        pid, status = os.wait()
        number = running.pop(pid)
        if status:
            _say([number, {"failed": _in_words(os.waitstatus_to_exitcode(status))}])


def _import_for(questions: list[simulate.Question]) -> None:
    """Load peft and bitsandbytes, if the job uses them, once for all forks: each takes over a second."""
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


def _in_words(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "the simulation's process was killed, most likely because this machine's memory was full"
    return f"the simulation's process ended with exit code {exit_code}"


def _say(answer: list) -> None:
    os.write(1, f"\n{simulate.MARK}{json.dumps(answer)}\n".encode())


def _answer_and_end(number: int, question: simulate.Question) -> None:
    """Answer in this process and exit it without cleanup: fake groups and engines have nothing to save."""
    try:
        _say([number, _answer(question)])
    except UserError as error:
        _say([number, {"mistake": str(error)}])
    except simulate.SimulationFailed as error:
        _say([number, {"failed": str(error)}])
    except BaseException as error:
        import traceback

        own = f"the recipe {question.program[0]}: {type(error).__name__}: {error}" if question.program else None
        _say([number, {"failed": own} if own else {"trace": traceback.format_exc()}])
    finally:
        sys.stdout.flush()
        os._exit(0)


def _answer(asked: simulate.Question) -> dict:
    """Train two steps as one rank of the job; return the answer of `simulate.run_all`."""
    import time

    began = time.perf_counter()
    os.environ |= {"LOCAL_WORLD_SIZE": str(asked.ranks)}
    from zerofit.config import resolve
    from zerofit.model import load

    settings = _in_host_memory(resolve.resolve(asked.request, asked.ranks, asked.gpu))
    config = load.load_config(settings)
    config.get_text_config().update(asked.overrides)
    resolve.resolve_for_model(settings, config)  # before TrainingArguments, which copy the DeepSpeed JSON
    _launched(settings, asked.rank)
    on_gpu = asked.device == "gpu"
    tracker = _tracker(asked.device)
    if on_gpu:
        overlaps = bool((settings.deepspeed or {}).get("zero_optimization", {}).get("overlap_comm"))
        fake_device.register_gpu(tracker, int(asked.gpu.memory_gib * 2**30), overlaps)
    _one_rank_of(settings, asked.rank)
    settings, arguments, *rows = _trainer_inputs(settings, asked)
    fake_device.without_inference_mode()
    with contextlib.ExitStack() as stack:
        if asked.fake:
            fake_device.fake_adam()
            fake_device.without_muon(settings)
            fake_device.skip_triton_kernels()
            fake_device.without_values(asked.padded, settings.max_length)
            tracker.watch = _fake_operations(stack, _rows_by_tokens(settings)).followed
        elif settings.compile_layers:
            _follow_compiled_layers(tracker)
        host_tracker = _host_tracker(stack, tracker.watch) if on_gpu else None
        stack.enter_context(tracker)
        with _without_collections():
            trainer = _trainer(settings, arguments, rows, config, asked)
        for hook in asked.before_training:
            file, _, function = hook.rpartition(":")
            runpy.run_path(file)[function](trainer)
        trainer.train()
        in_host = host_tracker.highest if host_tracker else tracker.host
        _evaluate_and_save(trainer, tracker)
        tracker.pause()
        return _measured(trainer, tracker) | {
            "host": in_host,
            "host_saving": max(0, host_tracker.highest - in_host) if host_tracker else 0,
            "allocator": _replayed(tracker.events, asked) if on_gpu else None,
            "seconds": round(time.perf_counter() - began, 2),
        }


def _measured(trainer, tracker) -> dict:
    """Return the peaks and the size of the model that was trained, a part of the answer."""
    from zerofit.model import quantization

    settings = trainer.settings
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in trainer.model.parameters()]
    return {
        "peak": tracker.peak,
        "total": {phase: sum(parts.values()) for phase, parts in tracker.peak.items()},
        "model_states": tracker.model_states,
        "parameters": sum(n for n, _ in sizes),
        "whole_parameters": quantization.bits(settings) is None and settings.ranks_that_split("matrices") == 1,
        "trainable": sum(n for n, trained in sizes if trained),
        "largest_block": tracker.largest,
    }


def _in_host_memory(settings):
    """Return the settings with what they offload to a disk in host memory instead: a GPU's bytes are the same.

    DeepSpeed would compile its swapper, and write to the disk.
    """
    from zerofit.config import nvme

    sections = nvme.paths_of(settings.deepspeed)
    if not sections:
        return settings
    zero = {**settings.deepspeed["zero_optimization"]}
    for name in sections:
        zero[name] = {key: value for key, value in zero[name].items() if key != "nvme_path"} | {"device": "cpu"}
    return settings.replace(deepspeed={**settings.deepspeed, "zero_optimization": zero}, offload_path=None)


def _replayed(events: list[tuple], asked: simulate.Question) -> dict:
    """Return what torch's caching allocator needs of the planned GPU for a rank's allocations and releases."""
    room = gpu_memory.room(asked.gpu, asked.ranks)
    return caching_allocator.needs(events, asked.expandable_segments, room)


def _rows_by_tokens(settings) -> dict[int, int]:
    """Return {tokens: rows} of the batches of training and evaluation; {} for slices, of which all labels count."""
    if settings.ranks_that_split("tokens") > 1:
        return {}
    sizes = (settings.per_device_train_batch_size, settings.per_device_eval_batch_size)
    rows = [size * settings.objective.documents for size in sizes]
    return {count * settings.max_length: count for count in rows}


@contextlib.contextmanager
def _without_collections():
    """Collect garbage at the end of the body only: tensors in cycles are then released at the same point each time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


def _tracker(device: str):
    """Return the rank's memory tracker, which follows all steps; of a GPU it keeps its events."""
    from zerofit.train.memory_tracker import MemoryTracker

    return MemoryTracker(
        device=device, round_to=1 if device == "cpu" else 512, keep_events=device == "gpu", followed_steps=sys.maxsize
    )


def _launched(settings, rank: int) -> None:
    """Set the variables of a launcher; a single rank without DeepSpeed runs without them."""
    if settings.deepspeed is not None or settings.world_size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings.world_size), "LOCAL_RANK": "0"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def _one_rank_of(settings, rank: int) -> None:
    """Open torch's fake process group, whose collectives move nothing and always succeed."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if settings.deepspeed is None and settings.world_size == 1:
        return
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
    """Run one evaluation batch, if the run evaluates, and the gathering of sharded or split weights for a save."""
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    settings = trainer.settings
    if settings.deepspeed is None or (settings.zero != 3 and settings.ranks_that_split("matrices") == 1):
        return
    with tracker.during("save"):  # as Trainer.save_model does
        if settings.zero == 3:
            trainer.deepspeed._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=settings.trains_adapter)
        else:
            trainer.deepspeed._consolidated_16bit_state_dict()


def _trainer_inputs(settings, asked: simulate.Question):
    """Return (Settings, TrainingArguments, tokenizer, rows, eval rows or None) for steps that write nothing."""
    import torch

    from zerofit.train.trainer import training_arguments

    device = asked.device
    settings = _few_steps(settings, asked)
    arguments = training_arguments(settings)
    if device != "cuda":
        fake_device.train_on(arguments, torch.device("gpu:0" if device == "gpu" else "cpu"))
    train_rows = _rows(settings, settings.effective_batch_size * simulate.STEPS)
    evaluates = settings.eval_data or settings.eval_fraction
    eval_rows = _rows(settings, settings.per_device_eval_batch_size * settings.data_ranks) if evaluates else None
    return settings, arguments, _Tokenizer(), train_rows, eval_rows


def _rows(settings, count: int):
    """Return a set of `count` rows of --max_length tokens; a row of a preference set has two documents."""
    from datasets import Dataset

    from zerofit.data.tokens import TokenizedDataset

    documents, width = settings.objective.documents, settings.max_length
    row = {name: [5] * width * documents for name in ("input_ids", "labels")}
    row |= {"lengths": [width] * documents} if documents > 1 else {}
    return TokenizedDataset(Dataset.from_list([row]).select([0] * count), {}, "simulated")


def _few_steps(settings, asked: simulate.Question):
    """Return the Settings of the simulated steps, which write nothing."""
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
        changes |= technique.simulated(settings, asked)
    if settings.fp16 and settings.deepspeed is None:
        changes |= {"fp16": False, "bf16": True}  # accelerate's fp16 refuses device "gpu"; same bytes
    if settings.deepspeed is not None:
        sizes = {"gradient_accumulation_steps": accumulation, "train_batch_size": batch}
        literal = {k: v for k, v in sizes.items() if settings.deepspeed.get(k) not in (None, "auto")}
        changes["deepspeed"] = settings.deepspeed | literal
    if asked.device != "cuda":
        changes |= {"use_cpu": True, "dataloader_pin_memory": False, "ddp_backend": None}
    return settings.replace(**changes)


def _fake_operations(stack, rows: dict[int, int]):
    """Return the mode that runs operations without memory, entered on the stack above torch's FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.plan.fake_operations import FakeOperations

    fake = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
    return stack.enter_context(FakeOperations(fake, rows))


def _follow_compiled_layers(tracker) -> None:
    """Let torch compile while the tracker follows operations; tell it of the tensors that compiled kernels write to."""
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

    tracker.watch, guards._empty_strided_cpu = WatchAround, allocate_followed  # generated code calls no operation


def _host_tracker(stack, watch):
    """Return a second memory tracker for tensors in host memory, followed by a context of `watch` on the stack."""
    from zerofit.train import memory_tracker

    tracker = memory_tracker.MemoryTracker(device="cpu")
    tracker.phase = "step"
    stack.enter_context(watch(tracker))
    return tracker


def _trainer(settings, arguments, rows, config, asked: simulate.Question):
    """Return the trainer and model as the recipe builds them. rows: tokenizer, training and eval rows."""
    import torch
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from zerofit.certificate import recorder
    from zerofit.model import adapters, attention, load, quantization
    from zerofit.train import progress

    on_gpu, fake = asked.device == "gpu", asked.fake
    device = "gpu:0" if on_gpu else "cpu"
    if on_gpu:
        one_by_one = attention.why_one_by_one(settings.replace(use_cpu=False), config) is not None
        fake_device.attention_stand_in(settings.attn_implementation, one_by_one)
    device_context = torch.device(device) if on_gpu else contextlib.nullcontext()
    tokenizer, train_rows, eval_rows = rows
    bits = quantization.bits(settings)
    if bits == 8 and fake:
        raise simulate.SimulationFailed("a base in 8 bits cannot be simulated")
    settings = settings.replace(random_init=bits is None or fake)
    if bits and fake:
        unset_hf_deepspeed_config()  # the engine shards packed weights after loading, not while they are loaded
        with torch.device("meta"):
            # loading in 4 bits would read the weights
            model = load.load_model(settings.replace(load_in_4bit=False), tokenizer, config)
        fake_device.quantize(model, device)
    with device_context:
        if not (bits and fake):
            model = load.load_model(settings, tokenizer, config)
        if settings.trains_adapter:
            model = adapters.add_adapter(model, settings)
    # not use_cpu: activations are then offloaded from the fake GPU
    settings = settings.replace(use_cpu=settings.use_cpu and not on_gpu)

    class SimulatedTrainer(_trainer_of(settings.recipe, asked.program[0] if asked.program else None)):
        def fuse_loss(self, net):
            with fake_device.real_tensors() if fake else contextlib.nullcontext():  # it computes test logits
                return super().fuse_loss(net)

        def counting(self, collate):
            return collate  # labels without values

    trainer = SimulatedTrainer(settings, model, tokenizer, arguments, train_rows, eval_rows)
    for callback in (progress.Reporter, recorder.Recorder):
        trainer.remove_callback(callback)
    return trainer


def _trainer_of(recipe, file: str | None) -> type:
    """Return the trainer of a recipe; file: of one of one's own. Raises: SimulationFailed if it is not found."""
    try:
        return program.trainer(recipe, Path(file) if file else None)
    except UserError as error:
        raise simulate.SimulationFailed(str(error).rstrip(".")) from None
