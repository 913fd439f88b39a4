"""`zerofit chat`: chat with a trained model in the terminal or through a pipe."""

import argparse
import sys

import torch

from zerofit.base.errors import UserError
from zerofit.data.chat_templates import arguments
from zerofit.export import source

HELP = "/new starts over, /help shows this, /quit or ctrl-d ends"


def main(argv: list[str]) -> None:
    """Run `zerofit chat`; see --help. Raises: UserError for what cannot be loaded."""
    parser = argparse.ArgumentParser(prog="zerofit chat", allow_abbrev=False, description=__doc__, epilog=HELP)
    parser.add_argument("run", help="a run folder, one of its checkpoints, its final/, or an export")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument(arguments.FLAG, type=str, help="a JSON object; default: what the model was trained with")
    parser.add_argument("--base", default="", help="the adapter's base, where it has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--trust_remote_code", action="store_true")
    args = parser.parse_args(argv)
    if args.temperature < 0 or args.max_new_tokens < 1:
        raise UserError("--temperature must be 0 or more, --max_new_tokens 1 or more.")
    args.chat_template_kwargs = arguments.parsed(arguments.FLAG, args.chat_template_kwargs)
    talk(args, source.find(args.run, args.base, args.trust_remote_code))


def talk(given, saved) -> None:
    """Answer each line of the input with a turn of the model, until the input ends."""
    from transformers import TextStreamer

    tokenizer = source.tokenizer(saved)
    if tokenizer is None:
        raise UserError(f"{saved.folder}: has no tokenizer to talk through; put the model's tokenizer beside it.")
    arguments.with_defaults(tokenizer.chat_template or "", given.chat_template_kwargs)  # refuses those it never reads
    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model = source.load(saved, device)
    model.config.use_cache = True
    terminal = sys.stdin.isatty()
    # The output of a pipe holds questions and answers alone.
    out = sys.stdout if terminal else sys.stderr
    print(f"{saved.folder}: all lines are one conversation ({HELP})", file=out, flush=True)
    start = [{"role": "system", "content": given.system}] if given.system else []
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
            prefix = "" if line == "/help" else f"{line.split()[0]} is no command; "
            print(f"{prefix}{HELP}", flush=True)
            continue
        turns.append({"role": "user", "content": line})
        try:
            answer = _answer(
                model, tokenizer, turns, given, TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            )
        except KeyboardInterrupt:  # stops this answer only
            turns.pop()
            print("\n(stopped)", flush=True)
            if not terminal:
                raise
            continue
        turns.append({"role": "assistant", "content": answer})


def _lines(prompt: str):
    """Yield the typed lines that are not empty, until ctrl-d; ctrl-c at the prompt is raised."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(net, words, turns: list[dict], given, streamer) -> str:
    """Generate the model's turn and print it as it is generated."""
    if words.chat_template:
        more = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = words.apply_chat_template(turns, **given.chat_template_kwargs, **more)
    else:
        inputs = words("\n".join(turn["content"] for turn in turns), return_tensors="pt")
    inputs = {name: inputs[name].to(net.device) for name in ("input_ids", "attention_mask")}
    sampling = {"do_sample": True, "temperature": given.temperature} if given.temperature else {"do_sample": False}
    pad_id = words.pad_token_id if words.pad_token_id is not None else words.eos_token_id
    output = net.generate(
        **inputs, max_new_tokens=given.max_new_tokens, streamer=streamer, pad_token_id=pad_id, **sampling
    )
    return words.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
