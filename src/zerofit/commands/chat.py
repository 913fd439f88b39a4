"""`zerofit chat`: chat with a trained model in the terminal or through a pipe."""

import argparse
import sys

import torch

from zerofit.base.errors import UserError
from zerofit.data.chat_templates import arguments
from zerofit.export import source

HELP = "/new: new conversation, /help: this text, /quit or ctrl-d: exit"


def main(argv: list[str]) -> None:
    """Run `zerofit chat`; see --help. Raises: UserError if the model cannot be loaded."""
    parser = argparse.ArgumentParser(prog="zerofit chat", allow_abbrev=False, description=__doc__, epilog=HELP)
    parser.add_argument("run", help="a run folder, one of its checkpoints, its final/, or an export")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy decoding")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument(arguments.FLAG, type=str, help="a JSON object; default: from training")
    parser.add_argument("--base", default="", help="base model of the adapter, if it has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--trust_remote_code", action="store_true")
    args = parser.parse_args(argv)
    if args.temperature < 0 or args.max_new_tokens < 1:
        raise UserError("--temperature must be 0 or more, --max_new_tokens 1 or more.")
    args.chat_template_kwargs = arguments.parse_arguments(arguments.FLAG, args.chat_template_kwargs)
    chat(args, source.find(args.run, args.base, args.trust_remote_code))


def chat(args, saved) -> None:
    """Generate an answer to each line of the input until the input ends."""
    from transformers import TextStreamer

    tokenizer = source.tokenizer(saved)
    if tokenizer is None:
        raise UserError(f"{saved.folder}: does not contain a tokenizer; copy the model's tokenizer there.")
    arguments.with_defaults(tokenizer.chat_template or "", args.chat_template_kwargs)  # raises for unknown names
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model = source.load(saved, device)
    model.config.use_cache = True
    terminal = sys.stdin.isatty()
    # Piped output contains only questions and answers.
    out = sys.stdout if terminal else sys.stderr
    print(f"{saved.folder}: one conversation ({HELP})", file=out, flush=True)
    start = [{"role": "system", "content": args.system}] if args.system else []
    turns = list(start)
    for line in _lines("> " if terminal else ""):
        if line == "/quit":
            return
        if not terminal:
            print(f"> {line}", flush=True)  # a pipe does not echo the question
        if line == "/new":
            turns = list(start)
            continue
        if line.startswith("/"):
            prefix = "" if line == "/help" else f"unknown command {line.split()[0]}; "
            print(f"{prefix}{HELP}", flush=True)
            continue
        turns.append({"role": "user", "content": line})
        try:
            answer = _answer(
                model, tokenizer, turns, args, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            )
        except KeyboardInterrupt:  # stop only this answer
            turns.pop()
            print("\n(stopped)", flush=True)
            if not terminal:
                raise
            continue
        turns.append({"role": "assistant", "content": answer})


def _lines(prompt: str):
    """Yield non-empty lines until ctrl-d."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(model, tokenizer, turns: list[dict], args, streamer) -> str:
    """Generate and stream the model's turn."""
    if tokenizer.chat_template:
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(turns, **args.chat_template_kwargs, **options)
    else:
        inputs = tokenizer("\n".join(turn["content"] for turn in turns), return_tensors="pt")
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    output = model.generate(
        **inputs, max_new_tokens=args.max_new_tokens, streamer=streamer, pad_token_id=pad_id, **sampling
    )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
