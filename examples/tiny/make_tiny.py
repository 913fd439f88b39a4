"""Make the bundled task: a tiny Llama, its tokenizer and chat template, and an instruction data set.

    python examples/tiny/make_tiny.py            # rewrites model/, train.jsonl, eval.jsonl next to this file

The model is pretrained on plain sentences about a fictional village of 48 people, but never on questions, so it
cannot answer before fine-tuning. The held-out questions use other wordings and, for twelve people, a fact that no
training question covers, so that the answer requires pretrained knowledge. About 5 minutes on 2 CPU cores.
"""

import json
import random
from pathlib import Path

HERE = Path(__file__).resolve().parent
SEED = 7
HELD_OUT_PEOPLE = 12  # people with a fact that train.jsonl never asks for
EVAL_ROWS = 200

NAMES = (
    "Ada Bo Cleo Dara Eli Fay Gus Hana Ivo June Kai Lena Milo Nora Otis Pia Quin Rosa Sam Tess Uma Vera "
    "Wim Xena Yara Zane Amos Bea Cyrus Dot Enzo Flora Gil Hope Iris Joss Kira Lars Mona Nils Olga Paul "
    "Rhea Sven Tara Ugo Vito Wren"
).split()
CITIES = "Oslo Rome Cairo Lima Paris Quito Delhi Tokyo Berlin Dakar Hanoi Perth".split()
JOBS = "baker pilot nurse farmer painter teacher sailor gardener doctor singer weaver potter".split()
PETS = "cat dog parrot rabbit turtle pony goat hamster".split()
COLOURS = "red green blue yellow purple orange white black".split()

# kind of fact -> (plain sentences for pretraining, questions for fine-tuning, the answer)
FACTS = {
    "city": (
        ["{n} lives in {v}.", "The home of {n} is in {v}.", "{v} is where {n} lives.", "{n} has a house in {v}."],
        ["Where does {n} live?", "In which city is the home of {n}?", "Tell me the city where {n} lives.",
         "{n} has a house in which city?", "Which city does {n} call home?", "Name the home city of {n}."],
        "{n} lives in {v}.",
    ),
    "job": (
        ["{n} works as a {v}.", "The job of {n} is {v}.", "{n} earns money as a {v}.", "A {v} by trade is {n}."],
        ["What is the job of {n}?", "What does {n} do for a living?", "Tell me how {n} earns money.",
         "What does {n} work as?", "Which trade has {n} learned?", "Name the profession of {n}."],
        "{n} works as a {v}.",
    ),
    "pet": (
        ["{n} has a pet {v}.", "The pet of {n} is a {v}.", "A {v} belongs to {n}.", "{n} feeds a {v} every day."],
        ["Which pet does {n} have?", "What animal belongs to {n}?", "Tell me what pet {n} has.",
         "What kind of animal does {n} feed?", "Which animal lives with {n}?", "Name the pet of {n}."],
        "{n} has a {v}.",
    ),
    "colour": (
        ["{n} likes the colour {v}.", "The favourite colour of {n} is {v}.", "{n} painted the door {v}.",
         "{v} is the colour that {n} likes best."],
        ["Which colour does {n} like?", "What is the favourite colour of {n}?", "Tell me the colour that {n} likes "
                                                                                "best.",
         "In which colour did {n} paint the door?", "What colour would {n} choose?", "Name the best colour for {n}."],
        "{n} likes {v}.",
    ),
}  # fmt: skip

CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|' + message['role'] + '|>\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|end|>' }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


def village(rng: random.Random) -> dict[str, dict[str, str]]:
    """Return four facts for each person."""
    values = {"city": CITIES, "job": JOBS, "pet": PETS, "colour": COLOURS}
    return {name: {kind: rng.choice(values[kind]) for kind in FACTS} for name in NAMES}


def corpus(people: dict, rng: random.Random, documents: int) -> list[str]:
    """Return the pretraining texts: descriptions of people in mixed wordings and order."""
    texts = []
    for _ in range(documents):
        sentences = []
        for name in rng.sample(NAMES, 2):
            for kind in rng.sample(list(FACTS), 3):
                sentences.append(rng.choice(FACTS[kind][0]).format(n=name, v=people[name][kind]))
        rng.shuffle(sentences)
        texts.append(" ".join(sentences))
    return texts


def questions(people: dict, rng: random.Random) -> tuple[list[dict], list[dict]]:
    """Return training and held-out rows {"messages": [user, assistant]}."""
    train, held_out = [], []
    never_asked = {(name, rng.choice(list(FACTS))) for name in rng.sample(NAMES, HELD_OUT_PEOPLE)}
    for name, facts in people.items():
        for kind, (_, wordings, answer) in FACTS.items():
            spared = rng.randrange(len(wordings))  # one wording of each fact is never trained
            for i, wording in enumerate(wordings):
                row = {
                    "messages": [
                        {"role": "user", "content": wording.format(n=name)},
                        {"role": "assistant", "content": answer.format(n=name, v=facts[kind])},
                    ]
                }
                (held_out if (name, kind) in never_asked or i == spared else train).append(row)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out[:EVAL_ROWS]


def make_tokenizer(texts: list[str]):
    """Return a byte-level BPE tokenizer of 512 tokens, which can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    raw.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": special[2:]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = 1024
    return tokenizer


def pretrain(tokenizer, texts: list[str], steps: int, batch: int = 48, block: int = 96):
    """A 4-layer Llama of 0.85 M parameters, trained on the descriptions alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    stream = torch.tensor([t for text in texts for t in [*tokenizer(text).input_ids, tokenizer.eos_token_id]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        start = torch.randint(len(stream) - block, (batch,))
        ids = torch.stack([stream[s : s + block] for s in start.tolist()])
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"pretraining step {step}/{steps} loss {loss.item():.3f}", flush=True)
    return model


def main() -> None:
    import torch

    rng = random.Random(SEED)
    people = village(rng)
    texts = corpus(people, rng, documents=6000)
    train, held_out = questions(people, rng)
    for name, rows in (("train.jsonl", train), ("eval.jsonl", held_out)):
        (HERE / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    contents = [m["content"] for row in train for m in row["messages"]]
    tokenizer = make_tokenizer(texts + contents)
    model = pretrain(tokenizer, texts, steps=1500)
    # bf16 like most published weights, so that every precision starts from the same numbers.
    model.to(torch.bfloat16).save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")
    print(f"{len(train)} training rows, {len(held_out)} held-out rows, {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
