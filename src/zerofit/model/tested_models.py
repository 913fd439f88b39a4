"""Report the results of `make models` for a model type, from tested_models.json."""

import functools
import json
from pathlib import Path

from zerofit.job.settings import Decision
from zerofit.job.technique import Technique


@functools.cache
def results() -> dict:
    """Return {"transformers": version, "types": {model type: {failed check: reason}}, "refused": {type: reason}}."""
    return json.loads(Path(__file__).with_suffix(".json").read_text())


def sentence(model_type: str) -> str:
    """Return a sentence on the test results of a model type."""
    version, failed = results()["transformers"], results()["types"].get(model_type)
    if failed is None:
        return f"model type {model_type}: not tested with zerofit; `zerofit models` lists the tested types"
    checks = f"all checks pass except {', '.join(failed)}" if failed else "all checks pass"
    command = f"zerofit models {model_type}"
    return f"model type {model_type}: tested with a tiny model, transformers {version}: {checks} ({command})"


def _add_decision(settings, config) -> None:
    passed = results()["types"].get(config.model_type) == {}
    settings.decisions.append(Decision(sentence(config.model_type), "model_type" if passed else ""))


TECHNIQUE = Technique(name="tested models", resolve_for_model=_add_decision)
