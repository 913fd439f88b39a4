"""Find the models that `zerofit eval` scores, and load them as lm-evaluation-harness's transformers model."""

import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs

from zerofit.base import distributed, hub
from zerofit.base.errors import UserError
from zerofit.export import source
from zerofit.model import attention
from zerofit.model.weights import files


@dataclass(frozen=True)
class Model:
    """A model to score."""

    title: str  # "base" or "tuned"
    saved: source.Saved
    without_adapter: bool = False  # score the adapter's base

    def as_json(self) -> dict:
        return {"title": self.title, "saved": asdict(self.saved), "without_adapter": self.without_adapter}

    @classmethod
    def from_json(cls, value: dict) -> "Model":
        saved = value["saved"]
        run = saved["run"] and Path(saved["run"])
        return cls(**value | {"saved": source.Saved(**saved | {"folder": Path(saved["folder"]), "run": run})})

    def tokenizer(self):
        """Return the tokenizer. Raises: UserError without one."""
        saved = source.Saved(Path(self.saved.base), remote=self.saved.remote) if self.without_adapter else self.saved
        if (tokenizer := source.tokenizer(saved)) is None:
            if not saved.folder.is_dir():
                raise UserError(
                    f"{saved.folder}: was removed when its run saved a newer checkpoint; train with --save_total_limit "
                    "0 to keep all checkpoints, or name the newest."
                )
            raise UserError(f"{saved.folder}: the tokenizer is missing; copy the model's tokenizer into this folder.")
        return tokenizer

    def load(self, device: str):
        """Load the model like chat and export: an adapter stays unmerged on its base, in the base's dtype and bits."""
        attention.avoid_wrong_kernels()
        load = source.load_base if self.without_adapter else source.load
        return load(self.saved, device).eval()


def to_score(run: str, base: str, skip_base: bool, remote: bool) -> list[Model]:
    """Return the base, if known, and the tuned model. Raises: UserError like source.find."""
    saved = source.find(run, base, remote)
    base_model = None if skip_base else _base(saved, base)
    return [*([base_model] if base_model else []), Model("tuned", saved)]


def _base(saved: source.Saved, explicit: str) -> Model | None:
    """Return the model that training started from; print a note and return None if it is unknown."""
    if saved.adapter:
        return Model("base", saved, without_adapter=True)
    name = explicit or str(saved.argument("model") or "")
    if not explicit and (saved.argument("random_init") or not name):
        why = "--random_init" if name else f"{saved.folder} does not name it; set --base"
        print(f"base: not scored ({why})", flush=True)
        return None
    place = f"--base {name}" if explicit else f"{saved.folder}: its base {name}"
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise UserError(f"{place}: no such folder; set its path with --base, or skip it with --skip_base.")
        revision = None if explicit else saved.argument("model_revision")
        folder = hub.fetch(name, place, revision)
        folder = hub.fetch(name, place, revision, (*hub.SMALL_FILES, *files.names(folder)))
    if not (folder / "config.json").exists() or not any(folder.glob(source.MODEL)):
        raise UserError(
            f"{place}: config.json or the safetensors weights are missing; set its path with --base, or skip it with "
            "--skip_base."
        )
    return Model("base", source.Saved(folder, remote=saved.remote))


def for_harness(model: Model, batch_size: str, template_arguments: dict):
    """Load a model for the harness, on this process's device and for the processes of this job."""
    from lm_eval.models.huggingface import HFLM

    class DistributedLM(HFLM):
        """HFLM that distributes rows over accelerate's ranks on any device.

        HFLM 0.4.13 does so only on several GPUs and only for a model that it has loaded itself.
        """

        @property
        def rank(self) -> int:
            return self.accelerator.process_index if hasattr(self, "accelerator") else 0

        @property
        def world_size(self) -> int:
            return self.accelerator.num_processes if hasattr(self, "accelerator") else 1

    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    no_timeout = InitProcessGroupKwargs(timeout=timedelta(weeks=52))  # as in the harness: answer lengths differ
    accelerator = Accelerator(cpu=not on_gpu, kwargs_handlers=[no_timeout]) if distributed.size() > 1 else None
    wrapped = DistributedLM(
        model.load(device),
        backend="causal",
        tokenizer=model.tokenizer(),
        batch_size=batch_size,
        trust_remote_code=model.saved.remote,
        chat_template_args=template_arguments,
    )
    if accelerator:
        wrapped.accelerator = accelerator
    return wrapped
