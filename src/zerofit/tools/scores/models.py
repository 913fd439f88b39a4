"""Say which models `zerofit eval` scores, and load them as lm-evaluation-harness's model of transformers."""

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
    saved: source.Saved  # its folder
    without_adapter: bool = False  # the base that the adapter in that folder was trained on

    def as_json(self) -> dict:
        return {"title": self.title, "saved": asdict(self.saved), "without_adapter": self.without_adapter}

    @classmethod
    def of_json(cls, value: dict) -> "Model":
        saved = value["saved"]
        run = saved["run"] and Path(saved["run"])
        return cls(**value | {"saved": source.Saved(**saved | {"folder": Path(saved["folder"]), "run": run})})

    def tokenizer(self):
        """Return the tokenizer. Raises: UserError without one."""
        saved = source.Saved(Path(self.saved.base), remote=self.saved.remote) if self.without_adapter else self.saved
        if (found := source.tokenizer(saved)) is None:
            if not saved.folder.is_dir():
                raise UserError(
                    f"{saved.folder}: was removed meanwhile, as its run saved a newer one; train with "
                    "--save_total_limit 0 to keep all checkpoints, or name the newest."
                )
            raise UserError(f"{saved.folder}: has no tokenizer to score it with; put the model's tokenizer beside it.")
        return found

    def load(self, device: str):
        """Return the model as chat and export load it: an adapter unmerged, on its base in the base's type and bits."""
        attention.avoid_wrong_kernels()
        load = source.load_base if self.without_adapter else source.load
        return load(self.saved, device).eval()


def to_score(run: str, base: str, skip_base: bool, remote: bool) -> list[Model]:
    """Return the base, where there is one, and the tuned model. Raises: UserError as source.find."""
    saved = source.find(run, base, remote)
    found = None if skip_base else _base(saved, base)
    return [*([found] if found else []), Model("tuned", saved)]


def _base(saved: source.Saved, given: str) -> Model | None:
    """Return the model that the folder's was trained from; None, said in a line, where there is none to score."""
    if saved.adapter:
        return Model("base", saved, without_adapter=True)
    name = given or str(saved.argument("model") or "")
    if not given and (saved.argument("random_init") or not name):
        why = "--random_init" if name else f"nothing in {saved.folder} names it; --base does"
        print(f"base: not scored ({why})", flush=True)
        return None
    place = f"--base {name}" if given else f"{saved.folder}: its base {name}"
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise UserError(f"{place}: no such folder; say where it is with --base, or leave it out with --skip_base.")
        revision = None if given else saved.argument("model_revision")
        folder = hub.fetch(name, place, revision)
        folder = hub.fetch(name, place, revision, (*hub.SMALL, *files.names(folder)))
    if not (folder / "config.json").exists() or not any(folder.glob(source.MODEL)):
        raise UserError(
            f"{place}: holds no config.json with weights in safetensors; name the base with --base, or leave it out "
            "with --skip_base."
        )
    return Model("base", source.Saved(folder, remote=saved.remote))


def for_harness(model: Model, batch_size: str, template_arguments: dict):
    """Load a model and return it as the harness's, on this process's device and among the processes of this job."""
    from lm_eval.models.huggingface import HFLM

    class Shared(HFLM):
        """The harness's model, which shares rows among the ranks of accelerate on any device.

        HFLM (0.4.13) takes its rank from accelerate on several GPUs only, and for a model that it has loaded itself.
        """

        @property
        def rank(self) -> int:
            return self.accelerator.process_index if hasattr(self, "accelerator") else 0

        @property
        def world_size(self) -> int:
            return self.accelerator.num_processes if hasattr(self, "accelerator") else 1

    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if on_gpu else "cpu"
    forever = InitProcessGroupKwargs(timeout=timedelta(weeks=52))  # as the harness: a rank may have the longest answers
    together = Accelerator(cpu=not on_gpu, kwargs_handlers=[forever]) if distributed.size() > 1 else None
    found = Shared(
        model.load(device),
        backend="causal",
        tokenizer=model.tokenizer(),
        batch_size=batch_size,
        trust_remote_code=model.saved.remote,
        chat_template_args=template_arguments,
    )
    if together:
        found.accelerator = together
    return found
