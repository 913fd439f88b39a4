"""`zerofit chat`: chat with a trained model in the terminal or through a pipe."""

import argparse
import sys

from zerofit.errors import UserError
from zerofit.export import source

HELP = "/new starts over, /help shows this, /quit or ctrl-d ends"


def main(argv: list[str]) -> None:
    """`zerofit chat`: see --help. Raises: UserError for what cannot be loaded."""
    parser = argparse.ArgumentParser(prog="zerofit chat", allow_abbrev=False, description=__doc__, epilog=HELP)
    parser.add_argument("run", help="a run folder, one of its checkpoints, its final/, or an export")
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token")
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument("--base", default="", help="the adapter's base, where it has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--trust_remote_code", action="store_true")
    given = parser.parse_args(argv)
    if given.temperature < 0 or given.max_new_tokens < 1:
        raise UserError("--temperature must be 0 or more, --max_new_tokens 1 or more.")
    talk(given, source.find(given.run, given.base, given.trust_remote_code))


def talk(given, found) -> None:
    """One turn a line until the end of the input."""
    import torch
    from transformers import TextStreamer

    words = source.tokenizer(found)
    if words is None:
        raise UserError(f"{found.folder}: has no tokenizer to talk through; put the model's tokenizer beside it.")
    device = given.device if given.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    net = source.load(found, device)
    net.config.use_cache = True
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{found.folder}  ({HELP})", flush=True)
    start = [{"role": "system", "content": given.system}] if given.system else []
    turns = list(start)
    for line in _lines("> " if terminal else ""):
        if line == "/quit":
            return
        if not terminal:
            print(f"> {line}", flush=True)  # a pipe shows no question of its own
        if line == "/new":
            turns = list(start)
            continue
        if line.startswith("/"):
            known = "" if line == "/help" else f"{line.split()[0]} is no command; "
            print(f"{known}{HELP}", flush=True)
            continue
        turns.append({"role": "user", "content": line})
        try:
            answer = _answer(net, words, turns, given, TextStreamer(words, skip_prompt=True, skip_special_tokens=True))
        except KeyboardInterrupt:  # stops this answer only
            turns.pop()
            print("\n(stopped)", flush=True)
            if not terminal:
                raise
            continue
        turns.append({"role": "assistant", "content": answer})


def _lines(prompt: str):
    """What is typed, without empty lines; ends with ctrl-d, and with ctrl-c at the prompt."""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line


def _answer(net, words, turns: list[dict], given, streamer) -> str:
    """The model's turn, printed as it comes."""
    if words.chat_template:
        ids = words.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        ids = words("\n".join(turn["content"] for turn in turns), return_tensors="pt")
    ids = {name: ids[name].to(net.device) for name in ("input_ids", "attention_mask")}
    chosen = {"do_sample": True, "temperature": given.temperature} if given.temperature else {"do_sample": False}
    pad = words.pad_token_id if words.pad_token_id is not None else words.eos_token_id
    out = net.generate(**ids, max_new_tokens=given.max_new_tokens, streamer=streamer, pad_token_id=pad, **chosen)
    return words.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()
