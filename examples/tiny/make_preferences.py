"""Make the bundled preference task: pairs about the village of make_tiny.py, and the model of `make sft`.

    python examples/tiny/make_preferences.py     # rewrites preference/ next to this file

The preferred answer to a question is a sentence ("Ada lives in Oslo."), to a request ("Name ...", "Tell me ...") the
bare fact ("Oslo."). Both answers of a pair are correct; the rejected one has the other form. The SFT model always
answers with a sentence, so it prefers the chosen answer in half of the pairs. The held-out pairs use wordings that no
training pair contains. About 1 minute on 2 CPU cores.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import make_tiny

HERE = Path(__file__).resolve().parent
SEED = 11
TRAIN_PAIRS, EVAL_PAIRS = 384, 160


def pairs(people: dict, rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Return training and held-out pairs {"prompt", "chosen", "rejected"}, half of them questions."""
    train, held_out = ({True: [], False: []} for _ in range(2))
    for name, facts in people.items():
        for kind, (_, wordings, answer) in make_tiny.FACTS.items():
            sentence, bare = answer.format(n=name, v=facts[kind]), f"{facts[kind]}."
            spared = {rng.choice([w for w in wordings if w.endswith("?") == asks]) for asks in (True, False)}
            for wording in wordings:
                asks = wording.endswith("?")
                chosen, rejected = (sentence, bare) if asks else (bare, sentence)
                pair = {"prompt": wording.format(n=name), "chosen": chosen, "rejected": rejected}
                (held_out if wording in spared else train)[asks].append(pair)
    sets = []
    for kinds, count in ((train, TRAIN_PAIRS), (held_out, EVAL_PAIRS)):
        rows = [pair for rows in kinds.values() for pair in rng.sample(rows, count // 2)]
        rng.shuffle(rows)
        sets.append(rows)
    return sets[0], sets[1]


def train_model(target: Path) -> None:
    """Write the model that recipes/sft.py trains on the bundled task, in bf16 like most published weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        recipe = HERE.parents[1] / "recipes" / "sft.py"
        subprocess.run([sys.executable, str(recipe), "--output_dir", f"{folder}/run", "--use_cpu", "true"], check=True)
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/run/final", dtype=torch.bfloat16)
        shutil.rmtree(target, ignore_errors=True)
        model.save_pretrained(target)
        AutoTokenizer.from_pretrained(f"{folder}/run/final").save_pretrained(target)


def main() -> None:
    train, held_out = pairs(make_tiny.village(random.Random(make_tiny.SEED)), random.Random(SEED))
    (HERE / "preference").mkdir(exist_ok=True)
    for name, rows in (("train.jsonl", train), ("eval.jsonl", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (HERE / "preference" / name).write_text(text, encoding="utf-8")
    train_model(HERE / "preference" / "model")
    print(f"{len(train)} training pairs, {len(held_out)} held-out pairs")


if __name__ == "__main__":
    main()
