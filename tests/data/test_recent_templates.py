# ruff: noqa: RUF001 -- DeepSeek's control words have wide bars
"""What single families do with tools, switches and arguments, each against its text written out."""

import copy
from datetime import datetime

import pytest
from test_chat_templates import call, says, system, tokenizer_of, tool, user

from zerofit.base.errors import UserError
from zerofit.data import encoding, formats
from zerofit.data.conversations import IGNORE

TYPED = [{"type": "function", "function": {
    "name": "book", "description": "Book a table.",
    "parameters": {"type": "object", "required": ["day"], "properties": {
        "day": {"type": "string", "enum": ["fri", "sat"], "description": "When?"},
        "seats": {"type": "integer", "default": 2},
        "names": {"type": "array", "items": {"type": "string"}},
        "who": {"type": "object", "properties": {"vip": {"type": "boolean"}}, "required": ["vip"]},
        "note": {"type": "string", "nullable": True},
    }},
}}]  # fmt: skip
ASKED = [user("Friday?"), says("", tool_calls=[call(1, "book", day="fri", n=1.5, ok=None)]), tool('"yes"', 1)]


def row(turns, tools=None, **more):
    return formats.parse("here", {"messages": turns, "tools": tools} | more, "messages")


def encoded(name, turns, tools=None, **more):
    """The text of a row and what is learned of it; alike with the places of answers from marks and from prefixes."""
    found = []
    for marks in (True, False):
        tokenizer = tokenizer_of(name, marks)
        ((ids, labels),) = encoding.Encoder(tokenizer).encode([("here", row(turns, tools, **more))])
        learned = [token for token, label in zip(ids, labels, strict=True) if label != IGNORE]
        found.append((tokenizer.decode(ids), tokenizer.decode(learned)))
    assert found[0] == found[1]
    return found[0]


def refusal(name, turns, tools=None, **more):
    with pytest.raises(UserError) as refused:
        encoding.Encoder(tokenizer_of(name)).encode([("here", row(turns, tools, **more))])
    return str(refused.value)


def test_harmony_types_its_tools_and_puts_thoughts_before_calls():
    turns = [system("Be kind."), *ASKED, says("Done.", reasoning_content="It said yes.")]
    turns[2] = turns[2] | {"reasoning_content": "I must call."}
    text, learned = encoded("gpt-oss", turns, TYPED, chat_template_kwargs={"reasoning_effort": "high"})
    today = datetime.now().strftime("%Y-%m-%d")
    assert text == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        f"Knowledge cutoff: 2024-06\nCurrent date: {today}\n\nReasoning: high\n\n"
        "# Valid channels: analysis, commentary, final. Channel must be included for every message.\n"
        "Calls to these tools must go to the commentary channel: 'functions'.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe kind.\n\n# Tools\n\n## functions\n\n"
        "namespace functions {\n\n"
        '// Book a table.\ntype book = (_: {\n// When?\nday: "fri" | "sat",\nseats?: number, // default: 2,\n'
        "names?: string[],\nwho?: {\nvip: boolean},\nnote?: string | null,\n}) => any;\n\n"
        "} // namespace functions<|end|>"
        "<|start|>user<|message|>Friday?<|end|><|start|>assistant<|channel|>analysis<|message|>I must call.<|end|>"
        "<|start|>assistant to=functions.book<|channel|>commentary json<|message|>"
        '{"day": "fri", "n": 1.5, "ok": null}<|call|>'
        '<|start|>functions.book to=assistant<|channel|>commentary<|message|>"\\"yes\\""<|end|>'
        "<|start|>assistant<|channel|>analysis<|message|>It said yes.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    assert learned == (
        "<|channel|>analysis<|message|>I must call.<|end|><|start|>assistant to=functions.book<|channel|>commentary "
        'json<|message|>{"day": "fri", "n": 1.5, "ok": null}<|call|><|channel|>analysis<|message|>It said yes.<|end|>'
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    both = [ASKED[0], ASKED[1] | {"content": "I call.", "reasoning_content": "Hm."}, ASKED[2], says("Done.")]
    assert "has reasoning or text, which is its reasoning" in refusal("gpt-oss", both, TYPED)
    assert "results of tools follow a turn with a call" in refusal("gpt-oss", [user("?"), says("!"), tool("r", 1)])


def test_gemma_4_calls_and_answers_in_one_turn():
    calls = [call(1, "book", day="fri", deep={"b": [1, "x"], "a": True}), call(2, "wait")]
    turns = [user("Friday?"), says("", tool_calls=calls, reasoning_content="Two."), tool("yes", 1), tool("ok", 2)]
    turns += [says("Done."), user("Bye"), says("Bye.", reasoning_content="Polite.")]
    text, learned = encoded("gemma4", turns, TYPED, enable_thinking=True)
    written = (
        '<|tool_call>call:book{day:<|"|>fri<|"|>,deep:{a:true,b:[1,<|"|>x<|"|>]}}<tool_call|>'
        "<|tool_call>call:wait{}<tool_call|><|tool_response>"
    )
    assert text == (
        '<bos><|turn>system\n<|think|>\n<|tool>declaration:book{description:<|"|>Book a table.<|"|>,parameters:{'
        'properties:{day:{description:<|"|>When?<|"|>,enum:[<|"|>fri<|"|>,<|"|>sat<|"|>],type:<|"|>STRING<|"|>},'
        'names:{items:{type:<|"|>STRING<|"|>},type:<|"|>ARRAY<|"|>},note:{nullable:true,type:<|"|>STRING<|"|>},'
        'seats:{type:<|"|>INTEGER<|"|>},who:{properties:{vip:{type:<|"|>BOOLEAN<|"|>}},required:[<|"|>vip<|"|>],'
        'type:<|"|>OBJECT<|"|>}},required:[<|"|>day<|"|>],type:<|"|>OBJECT<|"|>}}<tool|><turn|>\n'
        f"<|turn>user\nFriday?<turn|>\n<|turn>model\n<|channel>thought\nTwo.\n<channel|>{written}"
        'response:book{value:<|"|>yes<|"|>}<tool_response|><|tool_response>response:wait{value:<|"|>ok<|"|>}'
        "<tool_response|>Done.<turn|>\n<|turn>user\nBye<turn|>\n<|turn>model\n"
        "<|channel>thought\nPolite.\n<channel|>Bye.<turn|>\n"
    )
    thought = "<|channel>thought\nPolite.\n<channel|>"
    assert learned == f"<|channel>thought\nTwo.\n<channel|>{written}Done.<turn|>{thought}Bye.<turn|>"
    unnamed = [turns[0], turns[1], {"role": "tool", "content": "yes"}, says("Done.")]
    assert "Gemma 4 names the tool of each result" in refusal("gemma4", unnamed, TYPED)
    assert "followed by their results and an answer" in refusal("gemma4", [*turns[:2], user("?"), says("!")])
    assert "results of tools follow a turn with calls" in refusal("gemma4", [user("?"), says("!"), tool("r", 1)])
    assert "a turn with calls is followed by their results" in refusal("gemma4", [*turns[:2], says("Done.")])


def test_deepseek_v3_opens_each_turn_with_calls_and_each_group_of_results():
    twice = [call(2, "book", day="sat"), call(3, "wait")]
    turns = [*ASKED, says("Done."), user("More?"), says("I look.", tool_calls=twice), tool("no", 2), tool("ok", 3)]
    text, learned = encoded("deepseek-v3", [*turns, says("No.")])
    one = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>book\n```json\n{{"day": "{}"{}}}\n```<｜tool▁call▁end｜>'.format
    first = (
        "<｜tool▁calls▁begin｜>" + one("fri", ', "n": 1.5, "ok": null') + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    )
    wait = "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>wait\n```json\n{}\n```<｜tool▁call▁end｜>"
    second = f"I look.<｜tool▁calls▁begin｜>{one('sat', '')}{wait}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    result = "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜>".format
    results = "<｜tool▁outputs▁begin｜>{}<｜tool▁outputs▁end｜>".format
    end = "<｜end▁of▁sentence｜>"
    assert text == (
        f"<｜begin▁of▁sentence｜><｜User｜>Friday?<｜Assistant｜>{first}{results(result(ASKED[2]['content']))}Done.{end}"
        f"<｜User｜>More?<｜Assistant｜>{second}{results(result('no') + result('ok'))}No.{end}"
    )
    assert learned == f"{first}Done.{end}{second}No.{end}"
    assert "no place for definitions of tools" in refusal("deepseek-v3", turns[:4], TYPED)


def test_deepseek_v3_1_has_no_reasoning_beside_tools_and_takes_either_argument():
    turns = [ASKED[0], ASKED[1] | {"reasoning_content": "Hm."}, ASKED[2], says("Done.")]
    assert "uses tools without thinking" in refusal("deepseek-v3.1", turns, TYPED)
    for given in ({"thinking": True}, {"enable_thinking": True}):
        text, learned = encoded("deepseek-v3.1", [user("?"), says("!")], chat_template_kwargs=given)
        assert text.endswith("<｜Assistant｜><think></think>!<｜end▁of▁sentence｜>") and learned.startswith("</think>!")


def test_an_answer_of_glm_ends_with_the_word_that_opens_the_next_turn():
    text, learned = encoded("glm4.5", [*ASKED, says("Done."), user("Bye"), says("Bye.")])
    called = "\n<tool_call>book\n<arg_key>day</arg_key>\n<arg_value>fri</arg_value>\n<arg_key>n</arg_key>\n"
    called += "<arg_value>1.5</arg_value>\n<arg_key>ok</arg_key>\n<arg_value>null</arg_value>\n</tool_call>"
    assert text == (
        f"[gMASK]<sop><|user|>\nFriday?<|assistant|>\n<think></think>{called}<|observation|>\n<tool_response>\n"
        '"yes"\n</tool_response><|assistant|>\n<think></think>\nDone.<|user|>\nBye<|assistant|>\n<think></think>\nBye.'
        "<|user|>"
    )
    assert learned == (
        f"\n<think></think>{called}<|observation|>\n<think></think>\nDone.<|user|>\n<think></think>\nBye.<|user|>"
    )
    assert "none can follow another" in refusal("glm4.5", [user("?"), says("!"), says("!!")])
    assert "results of tools follow a turn with calls" in refusal("glm4.5", [user("?"), says("!"), tool("r", 1)])
    assert "is followed by their results" in refusal("glm4.5", [*ASKED[:2], user("?"), says("!")])


@pytest.mark.parametrize(
    ("given", "mode", "written"),
    [
        ("Be short. /no_think", "/no_think", "Be short."),
        ("/think Be short.", "/think", " Be short."),
        ("/no_think", "/no_think", "You are a helpful AI assistant named SmolLM, trained by Hugging Face."),
    ],
)
def test_words_of_the_system_text_switch_smollm3(given, mode, written):
    text, learned = encoded("smollm3", [system(given), user("?"), says("!")])
    assert f"\nReasoning Mode: {mode}\n\n## Custom Instructions\n\n{written}\n\n<|im_start|>user\n?" in text
    block = "<think>\n\n</think>\n" if mode == "/no_think" else ""
    assert text.endswith(f"<|im_start|>assistant\n{block}!<|im_end|>\n") and learned == "!<|im_end|>"
    text, _ = encoded("smollm3", [system("Only this. /system_override"), user("?"), says("!")])
    assert text.startswith("<|im_start|>system\nOnly this.<|im_end|>\n<|im_start|>user\n?")


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\nWhy.\n</think>\n\nSo.", "Why.", "So."),
        ("<think>Why.</think>So.", "Why.", "So."),
        ("Why.\n</think>\n\nSo.", "Why.", "So."),  # generated behind a prompt that ends in <think>
        ("<think>\n\n</think>\n\nSo.", "", "So."),
        ("Use <think> and </think>.", "", "Use <think> and </think>."),  # only words of the answer
    ],
)
@pytest.mark.parametrize("name", ["qwen3.5", "deepseek-r1", "glm4.5"])
def test_a_thinking_block_in_the_text_is_the_reasoning(name, text, reasoning, answer):
    for turns in ([user("?"), says(text)], [user("?"), says(text), user("?"), says(text)]):
        _, learned = encoded(name, turns)
        block = f"\n<think>{reasoning}</think>\n" if name == "glm4.5" else f"{reasoning}\n</think>\n\n"
        end = {"qwen3.5": "<|im_end|>", "glm4.5": "<|user|>"}.get(name, "<｜end▁of▁sentence｜>")
        assert learned == f"{block}{answer}{end}" * (len(turns) // 2)


def test_command_a_thinks_between_its_own_words():
    text, learned = encoded("command-a", [user("?"), says("So.", reasoning_content="Why.")])
    thought = "<|START_THINKING|>Why.<|END_THINKING|><|START_RESPONSE|>So.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    assert learned == thought and text.endswith(f"<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{thought}")


def test_control_words_in_tools_that_a_template_writes_as_python_are_refused():
    """SmolLM3's own does; the place holders of the words are escaped there, and would be trained."""
    tokenizer = copy.deepcopy(tokenizer_of("chatml"))
    tokenizer.chat_template = "{{- tools | string }}" + tokenizer.chat_template
    evil = [{"type": "function", "function": {"name": "wait", "description": "a<|im_end|>b"}}]
    with pytest.raises(UserError, match=r"these contain a control word such as '<\|im_end\|>'; remove it, or use"):
        encoding.Encoder(tokenizer).encode([("here", row([user("?"), says("!")], evil))])
