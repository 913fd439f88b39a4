"""One rank of a run that is not there: the kit's own trainer and the real engine, on tensors without memory.

The program behind the planner. It builds the very model, adapter, optimizer and DeepSpeed configuration of a recipe and
lets KitTrainer train two steps, while torch's FakeTensorMode makes every tensor a shape without bytes and its fake
process group stands for the other ranks. memory.Ledger follows what would have been alive.

    run("sft", ["--model", "folder", "--zero", "3"], ranks=64, gpu=hardware.GPUS["h100-80g"])["total"]["backward"]   # bytes

Runs in a process of its own: the patches below are for the whole process.
"""

import contextlib
import hashlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path

import yaml

from .args import PACKAGE

STEPS = 2  # the optimizer's states appear in the first, ZeRO-3 prefetches from the second on


class GhostFailed(Exception):
    """The job cannot be simulated, or nobody waits for it; the text is the reason in plain words."""


# --- the question, asked from outside ---


def question(
    recipe: str, flags: list[str], ranks: int, rank: int = 0, gpu=None, device: str | None = None,
    fake: bool = True, padded: bool = False, overrides: dict | None = None,
) -> dict:  # fmt: skip
    """What to ask for: the peak bytes of rank `rank` of `ranks`.

    Args:
        flags: the recipe's, with --model; the rows of --data are never opened.
        gpu: hardware.Gpu; None: as on this machine's CPU.
        device: "gpu" (without memory, host tensors told apart), "cpu" (as a CPU run would), "cuda" (a real GPU, with
            fake=False: what validation measures). Default: "gpu" with a `gpu`, else "cpu".
        fake: False keeps real tensors; only the other ranks are missing then.
        padded: rows differ in length, so that attention needs a mask.
        overrides: values laid over the model's config.json (fewer layers).
    """
    return {
        "recipe": recipe, "flags": flags, "ranks": ranks, "rank": rank, "gpu": asdict(gpu) if gpu else None, "fake": fake,
        "padded": padded, "device": device or ("gpu" if gpu else "cpu"), "overrides": overrides or {},
    }  # fmt: skip


def run(*args, **kwargs) -> dict:
    """The answer to one `question(...)`.

    Returns: {"peak": {phase: {part: bytes}}, "total": {phase: bytes}, "host": bytes of a rank's offload and loading,
        "host_saving": bytes more on rank 0 while it saves, "model_states": see memory.Ledger,
        "parameters", "trainable", "largest_block", "seconds"}.
    Raises: UserError for the user's mistakes, GhostFailed when it cannot be run that way.
    """
    (answer,) = run_all([question(*args, **kwargs)])
    if isinstance(answer, Exception):
        raise answer
    return answer


def run_all(questions: list[dict], cache: Path | None = None, seconds: float | None = None) -> list[dict | Exception]:
    """The answers, in order; an exception that `run` would raise stands in its place.

    Libraries are imported once and each question is answered in a fork, as many at once as there are cores. A question for
    a real GPU has a process to itself: CUDA cannot be used in a fork of a process that has looked for it.
    Args: cache: folder of answers by question. seconds: after which all that is left has failed; None: never.
    """
    answers: list = [_kept(cache, q) for q in questions]
    left = [i for i, answer in enumerate(answers) if answer is None]
    if not left:
        return answers
    if len(left) > 1 and any(questions[i]["device"] == "cuda" for i in left):
        for i in left:
            (answers[i],) = run_all([questions[i]], cache, seconds)
        return answers
    asked = [questions[i] for i in left]
    process = _taken() if all(map(_needs_no_device, asked)) else None
    process = process or _started(all(q["fake"] for q in asked), any(q["device"] == "cuda" for q in asked))
    output, errors = _ask(process, json.dumps(asked), seconds, keep=_reused and all(q["fake"] for q in asked))
    unanswered = (
        {"too slow": True} if output is None else {"trace": errors or "the simulation's process printed nothing"}
    )
    found = {}
    for line in (output or "").splitlines():
        if line.startswith(_MARK):
            number, answer = json.loads(line.removeprefix(_MARK))
            found[left[number]] = answer
    for i in left:
        answers[i] = _as_exception(found.get(i, unanswered), cache)
        answer = found.get(i)
        if cache and not isinstance(answers[i], Exception):  # failures may be of the moment
            _keep(cache, questions[i], answer)
    return answers


INSIDE = "ZEROFIT_GHOST"  # environment variable: this process is a ghost; --show, --dry_run and --probe mean others
_MARK = "ghost-answer: "
_DONE = "ghost-done"  # a line after the answers to one list of questions
_ready: list[subprocess.Popen] = []  # has imported the libraries, or does, and waits for questions
_reused = False  # whether a process is kept for the next questions


def get_ready() -> None:
    """Start the process that the next questions go to: it imports for seconds while the caller does other things."""
    if not _ready:
        _ready.append(_started(fake=True, cuda=False))


@contextlib.contextmanager
def reused():
    """Answer all questions of the body in one process, which imports the libraries once."""
    global _reused
    _reused = True
    try:
        yield
    finally:
        _reused = False
        dismiss()


def dismiss() -> None:
    """End what `get_ready` started when it was not asked anything."""
    if process := _taken():
        _kill(process)
        _close(process)


def _kill(process: subprocess.Popen) -> None:
    """End the process and its forks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _close(process: subprocess.Popen) -> None:
    for stream in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):  # what was not yet written has nobody to read it
            stream.close()


def _ask(process: subprocess.Popen, text: str, seconds: float | None, keep: bool = False) -> tuple[str | None, str]:
    """Return the process's answers to `text` (None: not within `seconds`), and what it has printed on stderr.

    Args: keep: let the process wait for the next questions; else it and its forks are gone afterwards.
    """
    answers, whole = [], False

    def read():
        nonlocal whole
        for line in process.stdout:
            if line.strip() == _DONE:
                whole = True
                return
            answers.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with contextlib.suppress(BrokenPipeError):  # it has ended; what it printed says why
            process.stdin.write(text + "\n")
            process.stdin.flush()
        reader.join(None if seconds is None else max(0.0, seconds))
        if reader.is_alive():
            return None, ""
        if whole and keep:
            _ready.append(process)
        process.stderr.seek(0)
        return "".join(answers), process.stderr.read()
    finally:
        if process not in _ready:
            _kill(process)
            reader.join()
            _close(process)


def _taken() -> subprocess.Popen | None:
    return _ready.pop() if _ready else None


def _needs_no_device(question: dict) -> bool:
    return question["fake"] and question["device"] != "cuda"


def _started(fake: bool, cuda: bool) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in _OF_A_LAUNCHER and not k.startswith("TORCHELASTIC_")}
    env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TOKENIZERS_PARALLELISM": "false", INSIDE: "1"}
    env |= {"OMP_NUM_THREADS": "1"} if fake else {}
    env |= {} if cuda else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    pipe = subprocess.PIPE
    words = [sys.executable, "-m", "zerofit", "simulated-rank"]
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (a pipe that nobody reads would fill up)
    process = subprocess.Popen(
        words, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env, start_new_session=True
    )
    process.stderr = errors
    return process


def _as_exception(answer: dict, cache: Path | None) -> dict | Exception:
    """The answer, or what stands in its place; the traceback of an unforeseen error goes to a file that is named."""
    from .errors import UserError

    if "mistake" in answer:
        return UserError(answer["mistake"])
    if "too slow" in answer:
        return GhostFailed("the simulation takes longer than a launch waits for it")
    if "trace" in answer:
        if cache is None:
            return GhostFailed(f"the simulation met an error of its own:\n{answer['trace']}")
        file = cache / "error.txt"
        try:
            cache.mkdir(parents=True, exist_ok=True)
            file.write_text(answer["trace"], encoding="utf-8")
        except OSError:
            return _as_exception(answer, None)
        return GhostFailed(f"the simulation met an error of its own, which {file} holds; please report it")
    return GhostFailed(answer["failed"]) if "failed" in answer else answer


def _kept(cache: Path | None, question: dict) -> dict | None:
    file = cache / f"{_key(question)}.json" if cache else None
    try:
        return json.loads(file.read_text()) if file else None
    except (OSError, ValueError):
        return None


def _keep(cache: Path, question: dict, answer: dict) -> None:
    file = cache / f"{_key(question)}.json"
    aside = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # the next plan asks again
        cache.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(answer))
        os.replace(aside, file)


_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
                  "MASTER_PORT", "LOCAL_SIZE", "ZEROFIT_PROBE")  # fmt: skip


def _key(question: dict) -> str:
    """A hash of the question and of everything that could change its answer."""
    import importlib.metadata

    from . import zero

    versions = [importlib.metadata.version(p) for p in ("torch", "transformers", "accelerate", "deepspeed", "peft")]
    sources = [file.stat().st_mtime_ns for file in sorted(PACKAGE.rglob("*.py"))]
    files = [file.read_text(errors="replace") for file in sorted(zero.CONFIGS.glob("*.json"))]
    files += _named_files(question["flags"])
    return hashlib.sha256(repr([question, versions, sources, files]).encode()).hexdigest()[:24]


def _named_files(words: list[str]) -> list[str]:
    """Return the content of every configuration file that these words name, or that such a YAML file names."""
    found = []
    for word in words:
        path = Path(word.partition("=")[2] if word.startswith("--") else word)
        with contextlib.suppress(OSError, RuntimeError):  # a word that is no path: too long, ~nobody
            path = path.expanduser()
            path = path / "config.json" if path.is_dir() else path
            if path.is_file() and path.suffix in (".json", ".yaml", ".yml"):
                found.append(path.read_text(errors="replace"))
                if path.suffix != ".json":
                    found += _named_files(_strings(found[-1]))
    return found


def _strings(text: str) -> list[str]:
    """Return the values of a YAML file's lines that are text, but those that name YAML files."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:  # args.read_yaml says it
        return []
    values = values.values() if isinstance(values, dict) else []
    return [value for value in values if isinstance(value, str) and not value.endswith((".yaml", ".yml"))]


# --- the answer, in a process of its own ---


def main(_: list[str]) -> None:
    import deepspeed  # noqa: F401  (what every fork would import)
    import transformers  # noqa: F401

    from . import model, train  # noqa: F401

    for line in sys.stdin:
        questions = json.loads(line)
        if questions[0]["device"] == "cuda":  # run_all asks for one alone
            _answer_and_end(0, questions[0])
        _answer_in_forks(questions)
        os.write(1, f"\n{_DONE}\n".encode())


def _answer_in_forks(questions: list[dict]) -> None:
    """Answer each question in a fork of this process, as many at once as there are cores."""
    import torch

    from . import world

    # Real tensors want all cores.
    workers = world.cores() if all(q["fake"] for q in questions) else 1
    waiting, running = list(enumerate(questions)), {}
    while waiting or running:
        while waiting and len(running) < workers:
            number, question = waiting.pop(0)
            torch.set_num_threads(1 if question["fake"] else world.cores())
            pid = os.fork()
            if not pid:
                _answer_and_end(number, question)
            running[pid] = number
        pid, status = os.wait()
        number = running.pop(pid)
        if status:
            _say([number, {"failed": _in_words(os.waitstatus_to_exitcode(status))}])


def _in_words(exit_code: int) -> str:
    if exit_code == -signal.SIGKILL:
        return "the simulation's process was killed, most likely because this machine's memory was full"
    return f"the simulation's process ended with exit code {exit_code}"


def _say(answer: list) -> None:
    os.write(1, f"\n{_MARK}{json.dumps(answer)}\n".encode())


def _answer_and_end(number: int, question: dict) -> None:
    """Answer in this fork, which ends without tidying up: fake process groups and engines have nothing to save."""
    from .errors import UserError

    try:
        _say([number, _answer(**question)])
    except UserError as error:
        _say([number, {"mistake": str(error)}])
    except GhostFailed as error:
        _say([number, {"failed": str(error)}])
    except BaseException:
        import traceback

        _say([number, {"trace": traceback.format_exc()}])
    finally:
        sys.stdout.flush()
        os._exit(0)


def _answer(recipe, flags, ranks, rank, gpu, device, fake, padded, overrides) -> dict:
    import time

    import torch

    began = time.perf_counter()
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
    from . import hardware, memory, resolve

    settings = resolve.settings(recipe, flags, ranks, hardware.Gpu(**gpu) if gpu else None)
    _launched(settings, rank)
    ledger = memory.Ledger(device=device, round_to=1 if device == "cpu" else 512)
    if device == "gpu":
        _register_gpu(lambda: int(gpu["memory_gib"] * 2**30) - ledger.live_bytes)
    _one_rank_of(settings, rank)
    arguments, *rows = _trainers_needs(settings, device)
    with contextlib.ExitStack() as stack:
        if fake:
            _without_values(padded, settings.max_length)
            stack.enter_context(torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True))
            micro = settings.per_device_train_batch_size
            stack.enter_context(_answers(micro * settings.max_length, micro))
        host = _host_ledger(stack) if device == "gpu" else None
        stack.enter_context(ledger)
        trainer = _trainer(settings, arguments, rows, overrides, device, fake)
        trainer.train()
        in_host = host.highest if host else ledger.host
        _evaluate_and_save(trainer, ledger)
        ledger.pause()
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in trainer.model.parameters()]
        return {
            "peak": ledger.peak,
            "total": {phase: sum(parts.values()) for phase, parts in ledger.peak.items()},
            "host": in_host,
            "host_saving": max(0, host.highest - in_host) if host else 0,
            "model_states": ledger.model_states,
            "parameters": sum(n for n, _ in sizes),
            "trainable": sum(n for n, trained in sizes if trained),
            "largest_block": ledger.largest,
            "seconds": round(time.perf_counter() - began, 2),
        }


def _launched(settings, rank: int) -> None:
    """The variables that a launcher would have set; one process without DeepSpeed runs without any."""
    if settings.deepspeed is not None or settings.world_size > 1:
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(settings.world_size), "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        }  # fmt: skip


def _one_rank_of(settings, rank: int) -> None:
    """torch's fake process group: collectives move nothing and always succeed."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if settings.deepspeed is None and settings.world_size == 1:
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=settings.world_size)
    if settings.deepspeed is None:
        return
    import deepspeed
    import deepspeed.comm

    believe_in_other_ranks(deepspeed)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)


def believe_in_other_ranks(deepspeed) -> None:
    """Checks that compare ranks, or values, would end on what the fake group leaves in the buffers."""
    from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator, stage3, stage_1_and_2

    for module in (partition_parameters, partitioned_param_coordinator, stage3):
        module.assert_ints_same_as_other_ranks = lambda *args, **kwargs: None
    for module in (stage3, stage_1_and_2):
        module.is_invalid_grad_norm = lambda norm: False
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # an inference op, compiled for a minute


def _register_gpu(free_bytes) -> None:
    """A device "gpu" that no machine has: its tensors are the GPU's, those of "cpu" the host's.

    Args: free_bytes: a function of no arguments, what is left of the planned GPU. DeepSpeed flattens the weights of stages 1
        and 2 there when they fit twice, else in host memory (runtime/zero/stage_1_and_2.py); without this it would ask how
        much memory the planning machine has.
    """
    import torch
    from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

    class Backend(_DummyBackendModule):
        def get_amp_supported_dtype(self):
            return [torch.bfloat16, torch.float16, torch.float32]

    _setup_privateuseone_for_python_backend("gpu", backend_module=Backend())
    _register_autocast()
    from deepspeed.accelerator import set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    from . import allocator

    typed = {"ByteTensor": torch.uint8, "FloatTensor": torch.float32, "HalfTensor": torch.float16,
             "BFloat16Tensor": torch.bfloat16, "IntTensor": torch.int32, "LongTensor": torch.int64,
             "DoubleTensor": torch.float64}  # fmt: skip

    class Accelerator(CPU_Accelerator):
        def device_name(self, device_index=None):
            return "gpu" if device_index is None else "gpu:0"

        def current_device(self):
            return 0

        def current_device_name(self):
            return "gpu:0"

        def is_fp16_supported(self):
            return True

        def pin_memory(self, tensor, *args, **kwargs):
            # torch pins by a copy; both live until the source dies
            size = tensor.numel() * tensor.element_size()
            block = torch.empty(allocator.pinned_bytes(size), dtype=torch.uint8, device="cpu")
            return block[:size].view(tensor.dtype).view(tensor.shape)

        def available_memory(self, device_index=None):
            return free_bytes()

        def on_accelerator(self, tensor):
            return tensor.device.type == "gpu"

        def __getattribute__(self, name):
            if name in typed:
                return lambda *size: _typed(torch, typed[name], *size)
            return super().__getattribute__(name)

    set_accelerator(Accelerator())
    plain = torch.tensor

    def tensor(data, *args, device=None, **kwargs):
        """A constant on a device that has no kernels: its shape is what counts."""
        if device is None or torch.device(device).type != "gpu":
            return plain(data, *args, device=device, **kwargs)
        shape = plain(data, *args, **kwargs)
        return torch.empty(shape.shape, dtype=shape.dtype, device="gpu:0")

    from deepspeed.runtime.zero import partition_parameters

    torch.tensor = partition_parameters._orig_torch_tensor = tensor  # zero.Init puts its own aside and back


_HALF = ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
_SINGLE = (
    "layer_norm",
    "softmax.int",
    "log_softmax.int",
    "nll_loss",
    "nll_loss_nd",
    "cross_entropy_loss",
    "pow.Tensor_Scalar",
)
_casts = []  # the autocast cache of device "gpu", and the registrations, which live as long as this process


def _register_autocast() -> None:
    """Autocast for device "gpu" as CUDA has it (aten/src/ATen/autocast_mode.h): what is cast, and what is kept.

    Half-precision copies of the weights live until the outermost autocast region ends.
    """
    import torch

    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    everything = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel)
    kept, library, clear = {}, torch.library.Library("aten", "IMPL", "AutocastPrivateUse1"), torch.clear_autocast_cache

    def cast(value, dtype):
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()) or value.dtype in (dtype, torch.float64):
            return value
        if dtype == torch.float32 or not (value.requires_grad and value.is_leaf and value.dtype == torch.float32):
            return value.to(dtype)
        if id(value) not in kept:
            kept[id(value)] = value.to(dtype)
        return kept[id(value)]

    def register(name, single):
        packet = getattr(torch.ops.aten, name.split(".")[0])
        operation = getattr(packet, name.partition(".")[2] or "default")

        def with_casts(*args, **kwargs):
            dtype = torch.float32 if single else torch.get_autocast_dtype("gpu")
            with torch._C._ExcludeDispatchKeyGuard(key):
                args = [cast(value, dtype) for value in args]
                return operation(*args, **{name: cast(value, dtype) for name, value in kwargs.items()})

        library.impl(name, with_casts)

    for name in (*_HALF, *_SINGLE):
        register(name, name in _SINGLE)

    def forget():
        kept.clear()
        clear()

    torch.clear_autocast_cache = forget
    _casts.extend([everything, library])


def _typed(torch, dtype, *size):
    if size and isinstance(size[0], int):
        return torch.empty(size, dtype=dtype, device="gpu:0")
    return torch.tensor(size[0] if size else [], dtype=dtype, device="gpu:0")


class _Tokenizer:
    """What a trainer asks of one; a plan needs no tokenizer files."""

    pad_token_id, padding_side = 0, "right"

    def __len__(self) -> int:
        return 0


def _evaluate_and_save(trainer, ledger) -> None:
    """One evaluation batch, where the run evaluates, and ZeRO-3's gathering of the weights for a save."""
    if trainer.eval_dataset is not None:
        trainer.evaluate()
    if trainer.is_deepspeed_enabled and trainer.accelerator.deepspeed_config["zero_optimization"]["stage"] == 3:
        ledger._during("save", trainer.accelerator.get_state_dict)(trainer.deepspeed)


def _trainers_needs(settings, device: str):
    """(TrainingArguments, tokenizer, training rows, eval rows or None) of STEPS steps that write nothing."""
    import torch
    from accelerate.state import PartialState
    from datasets import Dataset

    from . import data, train

    accumulation = min(settings.gradient_accumulation_steps, 2)  # the second micro batch is like all later ones
    batch = settings.per_device_train_batch_size * accumulation * settings.world_size
    settings.values |= {
        "max_steps": STEPS, "save_strategy": "no", "eval_strategy": "no", "report_to": [], "push_to_hub": False, "logging_steps": 10**6,
        "random_init": True,
        "gradient_accumulation_steps": accumulation, "effective_batch_size": batch, "seed": 0,
        "output_dir": str(Path(tempfile.gettempdir()) / "zerofit-ghost"), "dataloader_num_workers": 0, "resume_from_checkpoint": None, "load_best_model_at_end": False,
    }  # fmt: skip
    if settings.fp16 and settings.deepspeed is None:
        settings.values |= {"fp16": False, "bf16": True}  # accelerate knows its devices by name; the bytes are the same
    if settings.deepspeed is not None:
        for key, value in (("gradient_accumulation_steps", accumulation), ("train_batch_size", batch)):
            if settings.deepspeed.get(key) not in (None, "auto"):
                settings.deepspeed[key] = value
    if device != "cuda":
        settings.values |= {"use_cpu": True, "dataloader_pin_memory": False, "ddp_backend": None}
    arguments = train.training_arguments(settings)
    if device != "cuda":
        place = torch.device("gpu:0" if device == "gpu" else "cpu")
        PartialState._shared_state["device"] = arguments.__dict__["_setup_devices"] = place
    row = {"input_ids": [5] * settings.max_length, "labels": [5] * settings.max_length}

    def tokens(count):
        return data.Tokens(Dataset.from_list([row]).select([0] * count), {}, "ghost")

    evaluates = settings.eval_data or settings.eval_fraction
    held_out = tokens(settings.per_device_eval_batch_size * settings.world_size) if evaluates else None
    return arguments, _Tokenizer(), tokens(STEPS * batch), held_out


def _without_values(padded: bool, row: int) -> None:
    """Decisions of the libraries that read numbers, taken as a real batch of rows of `row` tokens would have them taken.

    inference_mode becomes no_grad: the same bytes, and its operations reach _answers in their plain form.
    """
    import torch
    import transformers.masking_utils as masks

    from . import attention, loss

    torch.Generator = _generator_class(torch.Generator)
    # torch's optimizers choose their foreach form by the parameters' exact type.
    importlib.import_module("torch.optim.optimizer")._foreach_supported_types.append(
        torch._subclasses.fake_tensor.FakeTensor
    )
    torch.inference_mode = lambda mode=True: torch.set_grad_enabled(not mode and torch.is_grad_enabled())
    masks.find_packed_sequence_indices = lambda position_ids: None
    masks.is_tracing = lambda *args, **kwargs: False
    masks.fast_all = lambda mask: not padded
    attention.spans = lambda bounds: [(i * row, (i + 1) * row) for i in range(bounds[1:].numel())]
    loss.logit_form = _with_numbers(loss.logit_form)
    torch.nn.Module._apply = _apply
    torch.nn.parallel.DistributedDataParallel = _distributed_data_parallel()


def _generator_class(plain):
    """torch.Generator for a device without kernels. A class, since modules that are imported later annotate with it."""

    class Generator(plain):
        def __new__(cls, device=None):
            return super().__new__(cls)

    return Generator


def _with_numbers(function):
    """`function` on real tensors, which it makes itself, in the middle of a run without memory."""
    from torch.utils._python_dispatch import _disable_current_modes

    def run(*args, **kwargs):
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


def _apply(module, change, recurse=True):
    """nn.Module._apply (to, bfloat16 ...) for parameters without memory, which torch would swap and cannot."""
    for part in module.modules():
        for parameter in part._parameters.values():
            if parameter is not None:
                new = change(parameter.data)
                if (new.dtype, new.device) != (parameter.dtype, parameter.device):
                    parameter.data = new
        for name, buffer in part._buffers.items():
            if buffer is not None:
                buffer.constant = None  # a number that fake tensors remember, and would compute with
                part._buffers[name] = change(buffer)
    return module


def _answers(tokens: int, rows: int):
    """What a number read from a tensor is: 1.0 (a loss, a norm), 0 (an overflow counter), False (an overflow).

    Args: tokens, rows: of a micro batch; all labels count but the first of each row, which nothing predicts.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answers(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            if operation is torch.ops.aten._local_scalar_dense.default:
                dtype = args[0].dtype
                return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 0
            if operation is torch.ops.aten.nonzero.default:  # which labels count: all of them
                count = args[0].numel() - (rows if args[0].numel() == tokens else 0)
                return args[0].new_empty((count, args[0].ndim), dtype=torch.long)
            if operation is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool and len(args[1]) == 1:
                mask = args[1][0]
                return args[0].new_empty(mask.numel(), *args[0].shape[mask.ndim :])
            if operation is torch.ops.aten.allclose.default:
                return True
            return operation(*args, **(kwargs or {}))

    return Answers()


def _distributed_data_parallel():
    """DistributedDataParallel reads its tensors in C++; this one holds the memory that it holds."""
    import torch

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module, *args, **kwargs):
            super().__init__()
            self.module = module
            trained = [p for p in module.parameters() if p.requires_grad]
            # One storage for each type stands for the buckets, of which the gradients are views (ddp.apply).
            self.buckets, at = {}, {}
            for p in trained:
                at.setdefault(p.dtype, []).append(p)
            for dtype, parameters in at.items():
                self.buckets[dtype] = torch.zeros(
                    sum(p.numel() for p in parameters), dtype=dtype, device=parameters[0].device
                )
                offset = 0
                for p in parameters:
                    self._hook(p, self.buckets[dtype][offset : offset + p.numel()].view(p.shape))
                    offset += p.numel()

        def _hook(self, parameter, view):
            def into_bucket(p):
                p.grad = view

            parameter.register_post_accumulate_grad_hook(into_bucket)

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

        @contextlib.contextmanager
        def no_sync(self):
            yield

    return DistributedDataParallel


def _host_ledger(stack):
    """A second ledger, of what stays in host memory."""
    from . import memory

    host = memory.Ledger(device="cpu")
    host.phase = "step"
    stack.enter_context(memory._Watch(host))
    return host


def _trainer(settings, arguments, rows, overrides, device, fake):
    """KitTrainer with the recipe's model, as the recipe builds it. rows: what _trainers_needs returns."""
    import torch
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    from . import adapters, loss, mlp, model, offload, quantized, train

    if overrides:
        plain = model.load_config

        def load_config(settings):
            config = plain(settings)
            for name, value in overrides.items():
                setattr(config.get_text_config(), name, value)
            return config

        model.load_config = load_config
    if device == "gpu":
        _attention_stand_in(settings.attn_implementation)
    place = torch.device("gpu:0") if device == "gpu" else contextlib.nullcontext()
    config = model.load_config(settings)
    loss.choose(settings, config)
    mlp.choose(settings, config)
    if offload.depends_on_size(settings.deepspeed):
        offload.check_sizes(settings, model.check(settings))
    tokenizer, train_rows, eval_rows = rows
    width = quantized.bits(settings)
    if width == 8 and fake:
        raise GhostFailed("a base in 8 bits cannot be simulated")
    settings.values["random_init"] = width is None or fake
    if width and fake:
        settings.values["load_in_4bit"] = False  # loading would need the weights
        unset_hf_deepspeed_config()  # packed weights are shared out by the engine, not while they are loaded
        with torch.device("meta"):
            net = model.load_model(settings, tokenizer)
        settings.values["load_in_4bit"] = True
        _quantise(net, "gpu:0" if device == "gpu" else "cpu")
    with place:
        if not (width and fake):
            net = model.load_model(settings, tokenizer)
        if settings.recipe == "lora":
            net = adapters.add(net, settings)
    on_gpu = device == "gpu"
    torch.cuda.get_device_name = (lambda *_: "a ghost") if on_gpu else torch.cuda.get_device_name
    settings.values["use_cpu"] = settings.use_cpu and not on_gpu  # offloaded activations go somewhere
    trainer = train.KitTrainer(settings, net, tokenizer, arguments, train_rows, eval_rows)
    trainer.remove_callback(train.Reporter)
    return trainer


def _quantise(net, device: str) -> None:
    """Linear layers with packed NF4 weights and doubly quantised constants: bitsandbytes' own code, on no memory."""
    import bitsandbytes
    import torch

    class Linear4bit(bitsandbytes.nn.Linear4bit):
        """Its parameter is a plain one: bitsandbytes' own kind cannot wrap a tensor without memory."""

        def __init__(self, linear):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
            self.compute_dtype = linear.weight.dtype
            packed, state = bitsandbytes.functional.quantize_4bit(
                torch.empty_like(linear.weight, device=device), blocksize=64, compress_statistics=True,
                quant_type="nf4", quant_storage=linear.weight.dtype,
            )  # fmt: skip
            self.weight = torch.nn.Parameter(packed, requires_grad=False)
            self.weight.compress_statistics, self.weight.quant_type, self.weight.quant_state = True, "nf4", state

        def forward(self, x):
            state, bias = self.weight.quant_state, None if self.bias is None else self.bias.to(self.compute_dtype)
            out = bitsandbytes.matmul_4bit(x.to(self.compute_dtype), self.weight, bias=bias, quant_state=state)
            return out.to(x.dtype)

    head = net.get_output_embeddings()
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child is not head:
                setattr(parent, name, Linear4bit(child))
    made = {}  # a tied head stays tied
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                made[id(parameter)] = (
                    made[id(parameter)]
                    if id(parameter) in made
                    else torch.nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=False)
                )
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    net.is_loaded_in_4bit = True


def _attention_stand_in(name: str) -> None:
    """Flash attention's saved tensors, output and workspaces, without its numbers (flash_api.cpp of FlashAttention 2).

    It saves q, k, v, the output and one fp32 number a query; its backward accumulates dq in fp32.
    """
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    if name == "eager":
        return

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):  # (rows, heads, tokens, head_dim) views of (rows, tokens, heads, head_dim)
            rows, heads, tokens, _ = q.shape
            out = q.new_empty(rows, tokens, heads, v.shape[-1]).transpose(1, 2)
            ctx.save_for_backward(q, k, v, out, q.new_empty(rows, heads, tokens, dtype=torch.float32))
            return out

        @staticmethod
        def backward(ctx, upstream):
            q, k, v, _, _ = ctx.saved_tensors
            rows, heads, tokens, size = q.shape
            tokens, size = -(-tokens // 128) * 128, -(-size // 32) * 32
            dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
            work = [q.new_empty(rows, heads, tokens, dtype=torch.float32),
                    q.new_empty(rows, tokens, heads, size, dtype=torch.float32)]  # fmt: skip
            if k.shape[1] != heads:  # one gradient a query head, summed afterwards
                work += [k.new_empty(rows, k.shape[2], heads, x.shape[-1]) for x in (k, v)]
            del work
            return dq, dk, dv

    def attention(module, query, key, value, mask, *args, **kwargs):
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else value.dtype
        out = Flash.apply(query.to(dtype), key.to(dtype), value.to(dtype))
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register(name, attention)
    if name != "sdpa":
        AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
