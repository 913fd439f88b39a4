"""Each of 2 ranks: load models as a run does, without the check of their files before; what each is refused with.

    torchrun --nproc_per_node 2 tests/model/weights_ranks.py '{"name": ["sft", "3", "FOLDER"], ...}'

Started by test_load.py; rank 0 prints a line of JSON: {name: [what each rank says, ...]}.
"""

import json
import sys

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.config import resolve
from zerofit.model.load import load_model, load_tokenizer
from zerofit.train.trainer import training_arguments


def loaded(recipe: str, stage: str, folder: str) -> str:
    """Return the error of load_model, else the line of the certificate and the decisions about the base."""
    flags = ["--model", folder, "--data", "rows.jsonl", "--zero", stage, "--use_cpu", "true", "--output_dir", "unused"]
    settings = resolve.resolve_settings(recipe, flags, 2)
    resolve.resolve_for_model(settings)
    distributed.start(settings)
    arguments = training_arguments(settings)  # kept: it registers ZeRO-3's configuration as long as it lives
    try:
        load_model(settings, load_tokenizer(settings))
    except UserError as error:
        return str(error)
    finally:
        del arguments
    said = [check.sentence for check in settings.checks]
    return " | ".join([*said, *(line for line in settings.decisions if line.startswith("base weights"))])


def main() -> None:
    said = {name: distributed.all_gather(loaded(*case)) for name, case in json.loads(sys.argv[1]).items()}
    if distributed.rank() == 0:
        print(json.dumps(said), flush=True)
    distributed.stop()


if __name__ == "__main__":
    main()
