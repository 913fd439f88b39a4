"""Plan every example and write the table of examples/README.md.

python examples/generate.py              plan all and write (about 15 minutes on an idle core; answers are cached)
python examples/generate.py NAME ...     plan these and print, without writing
python examples/generate.py --check      exit 1 where the table is not what the plans say
"""

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from zerofit.base import allocator, command_line, hardware, log_filters
from zerofit.base.hardware import GIB
from zerofit.config import resolve
from zerofit.plan import candidates, choice, predict
from zerofit.plan.candidates import Checkpointing
from zerofit.plan.speed import step

EXAMPLES = Path(__file__).resolve().parent
README = EXAMPLES / "README.md"
BEGIN = "<!-- made by examples/generate.py -->"
HEAD = re.compile(
    r"# make (?P<recipe>\w+)[^\n]*\n# planned for (?:(?P<nodes>\d+) nodes of )?(?P<gpus>\d+) x (?P<gpu>\S+)\n"
)
RECOMPUTED = {
    "none": Checkpointing(0), "selective": Checkpointing(1, selective=True), "every 2nd layer": Checkpointing(2),
    "every layer": Checkpointing(1),
}  # fmt: skip
SECONDS = 3600.0  # that a plan may take here; a launch waits 18
COLUMNS = ["example", "model", "method", "GPUs", "row, batch", "recomputed", "GPU memory", "host memory of a node",
           "tokens a second", "10 million tokens"]  # fmt: skip


@dataclass
class Example:
    """An example's file, and what its first two lines say."""

    name: str
    recipe: str
    gpus: int
    nodes: int
    gpu: str

    @property
    def file(self) -> Path:
        return EXAMPLES / f"{self.name}.yaml"

    @property
    def values(self) -> dict:
        return yaml.safe_load(self.file.read_text(encoding="utf-8"))

    @property
    def config(self) -> Path:
        """The folder with the config.json of the model."""
        return EXAMPLES / "models" / self.values["model"].rpartition("/")[2]

    @property
    def method(self) -> str:
        adapter = "QLoRA" if self.values.get("load_in_4bit") else "LoRA" if "lora_r" in self.values else "all weights"
        kind = f"DPO, {adapter}" if self.recipe == "dpo" else adapter
        stage = f", ZeRO-{self.values['zero']}" if self.values.get("zero") else ""
        offload = f", {self.values['offload']} on the host" if "offload" in self.values else ""
        return kind + stage + offload + (f", {self.values['sp_size']} GPUs a row" if "sp_size" in self.values else "")


def all_examples() -> list[Example]:
    return [of_file(file) for file in sorted(EXAMPLES.glob("*.yaml")) if file.stem != "my_run"]


def of_file(file: Path) -> Example:
    head = HEAD.match(file.read_text(encoding="utf-8"))
    assert head, f"{file}: the first two lines name the command and the GPUs"
    return Example(file.stem, head["recipe"], int(head["gpus"]), int(head["nodes"] or 1), head["gpu"])


def settings_of(example: Example, **more):
    """Return the settings of the very job of an example, with the model's config.json and without its rows.

    Args: more: arguments beside those of the file.
    """
    flags = ["--config", str(example.file), "--model", str(example.config), "--data", candidates.UNNAMED,
             "--ignore_plan", "true"]  # fmt: skip
    flags = command_line.put(flags, **more)
    gpu = hardware.find(example.gpu, example.gpus)
    return resolve.resolve_settings(example.recipe, flags, example.gpus * example.nodes, gpu)


def plan(example: Example, known: str | None = None) -> dict:
    """Return what a launch would run with: {"recomputed": which layers; "needs", "has": bytes of a GPU; "fits",
    "host": bytes of a node; "speed": tokens a second; "batch", "max_length"}.

    Args: known: which layers are recomputed, of RECOMPUTED. None: chosen, as a launch does.
    """
    os.environ["LOCAL_WORLD_SIZE"] = str(example.gpus)
    allocator.configure()
    chosen = RECOMPUTED[known].flags if known else choice.choose(settings_of(example), seconds=SECONDS).flags
    settings = settings_of(example, **chosen)
    answer = predict.predict(settings)
    assert "by" not in answer, f"{example.name}: {answer['by']}"
    setting = candidates.setting_of(settings)
    tokens = setting.tokens * setting.accumulation * settings.data_ranks
    return {
        "recomputed": next(k for k, v in RECOMPUTED.items() if v == candidates.checkpointing_of(settings)),
        "needs": answer["peak_bytes"] + answer["outside_bytes"],
        "has": settings.planned_gpu.memory_gib * GIB,
        "fits": answer["peak_bytes"] <= answer["limit_bytes"],
        "host": answer["host"] * example.gpus,
        "speed": tokens / step.seconds(
            candidates.shape_of(settings), setting, settings.planned_gpu, settings.max_length
        ),
        "batch": settings.effective_batch_size,
        "max_length": settings.max_length,
    }  # fmt: skip


def row(example: Example, planned: dict) -> str:
    gpus = f"{example.gpus} x {example.gpu}" + (f" on each of {example.nodes} nodes" if example.nodes > 1 else "")
    minutes = 1e7 / planned["speed"] / 60
    too_large = "" if planned["fits"] else ": **does not fit**"
    cells = [
        f"[{example.name}]({example.name}.yaml)", example.values["model"].rpartition("/")[2], example.method, gpus,
        f"{planned['max_length']:,}, {planned['batch']}", planned["recomputed"],
        f"{planned['needs'] / GIB:.1f} of {planned['has'] / GIB:.1f} GiB{too_large}",
        f"{planned['host'] / GIB:,.0f} GiB" if planned["host"] >= GIB / 2 else "",
        f"{planned['speed']:,.0f}", f"{minutes / 60:.1f} h" if minutes >= 100 else f"{minutes:.0f} min",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    log_filters.libraries()
    named = [word for word in sys.argv[1:] if not word.startswith("--")]
    examples = [example for example in all_examples() if not named or example.name in named]
    rows = []
    for example in examples:
        rows.append(row(example, plan(example)))
        print(rows[-1], flush=True)
    if named:
        return
    text = README.read_text(encoding="utf-8")
    head = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    new = text.partition(BEGIN)[0] + "\n".join([BEGIN, "", *head, *rows]) + "\n"
    if "--check" in sys.argv:
        raise SystemExit(0 if new == text else f"{README}: is not what the plans say; run examples/generate.py")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
