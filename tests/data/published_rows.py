"""Rows in the forms of published data sets, each with the turns that it stands for, for test_published_rows.py.

The texts are our own; columns, keys and roles are those of the data set or of the kit that is named.
"""

import json
from dataclasses import dataclass

Turn = tuple  # (role, text, trained or not) or (role, text, trained, {"reasoning": ..., "calls": [(name, arguments)]})


@dataclass(frozen=True)
class Case:
    """Rows of one form, and what they stand for."""

    name: str
    rows: object  # list of rows, or the text of the file
    wanted: object  # of each row that is trained its turns, of a pair both sides; or a pattern of the refusal
    note: str = ""  # a pattern of a line that is printed
    recipe: str = "sft"
    file: str = "rows.jsonl"

    def text(self) -> str:
        """Return the text of the file."""
        if isinstance(self.rows, str):
            return self.rows
        return "".join(json.dumps(row) + "\n" for row in self.rows)


def ask(text):
    return ("user", text, False)


def say(text, trained=True, **more):
    return ("assistant", text, trained, *([more] if more else []))


def told(text):
    return ("system", text, False)


HI = [ask("Hi?"), say("Hello.")]
TWO = [ask("Hi?"), say("Hello."), ask("Bye?"), say("Goodbye.")]
PAIR = ([ask("Hi?"), say("Good.")], [ask("Hi?"), say("Bad.")])
CHAT = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]
AGAIN = [{"role": "user", "content": "Bye?"}, {"role": "assistant", "content": "Goodbye."}]
GOOD = [CHAT[0], {"role": "assistant", "content": "Good."}]
BAD = [CHAT[0], {"role": "assistant", "content": "Bad."}]


def parts(*pairs):
    return [{"type": kind, "value": value} for kind, value in pairs]


def v1(role, *pairs, **more):
    return {"role": role, "content": parts(*pairs), **more}


V1_GOOD = [v1("user", ("text", "Hi?"), loss_weight=0.0), v1("assistant", ("text", "Good."), loss_weight=1.0)]
V1_BAD = [v1("user", ("text", "Hi?"), loss_weight=0.0), v1("assistant", ("text", "Bad."), loss_weight=1.0)]
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def message(name, parent, role, text, **more):
    """A message of Open Assistant's published rows."""
    return {"message_id": name, "parent_id": parent, "message_tree_id": "a", "role": role, "text": text, **more}


def seed(name, parent, role, text):
    """A message of Open Assistant's realistic_seed_data.json."""
    return {
        "task_message_id": f"t{name}", "user_message_id": name, "parent_message_id": parent, "role": role, "text": text,
    }  # fmt: skip


TREE = [
    message("a", None, "prompter", "Hi?"),
    message("b", "a", "assistant", "Worse.", rank=1),
    message("c", "a", "assistant", "Hello.", rank=0),
    message("d", "c", "prompter", "Bye?"),
    message("e", "d", "assistant", "Goodbye."),
]

# Forms that were refused, or read otherwise than they are meant, in the files of the other kits.
LISTED = [
    Case("LLaMA-Factory v1: text", [{"messages": V1_GOOD}], [PAIR[0]]),
    Case(
        "LLaMA-Factory v1: reasoning and a tool call",
        [{
            "messages": [
                v1("system", ("text", "Be short.")),
                v1("user", ("text", "Rain?")),
                v1("assistant", ("reasoning", "I look."),
                   ("tool_call", '{"name": "weather", "arguments": {"city": "Oslo"}}')),
                v1("tool", ("text", "no")),
                v1("assistant", ("reasoning", "It is dry."), ("text", "No.")),
            ],
            "tools": json.dumps(WEATHER),
        }],
        [[told("Be short."), ask("Rain?"), say("", reasoning="I look.", calls=[("weather", {"city": "Oslo"})]),
          ("tool", "no", False), say("No.", reasoning="It is dry.")]],
    ),
    Case("LLaMA-Factory v1: preference", [{"chosen_messages": V1_GOOD, "rejected_messages": V1_BAD}], [PAIR],
         recipe="dpo"),
    Case("chosen_response, rejected_response", [{"prompt": "Hi?", "chosen_response": "Good.",
                                                 "rejected_response": "Bad."}], [PAIR], recipe="dpo"),
    Case("chosen_answer, rejected_answer", [{"question": "Hi?", "chosen_answer": "Good.", "rejected_answer": "Bad."}],
         [PAIR], recipe="dpo"),
    Case("Argilla's ultrafeedback-binarized-preferences",
         [{"source": "a", "instruction": "Hi?", "chosen_response": "Good.", "rejected_response": "Bad.",
           "chosen_avg_rating": 5.0, "rejected_avg_rating": 1.0, "chosen_model": "m"}], [PAIR], recipe="dpo"),
    Case("stack-exchange-paired: response_j, response_k",
         [{"qid": 1, "question": "Hi?", "date": "d", "response_j": "Good.", "response_k": "Bad."}], [PAIR],
         recipe="dpo"),
    Case("ms-swift: messages and rejected_response",
         [{"messages": GOOD, "rejected_response": "Bad."}], [PAIR], recipe="dpo"),
    Case("ms-swift: query, response, rejected_response",
         [{"query": "Hi?", "response": "Good.", "rejected_response": "Bad."}], [PAIR], recipe="dpo"),
    Case("ms-swift: conversation of human and assistant",
         [{"system": "Be short.", "conversation": [{"human": "Hi?", "assistant": "Hello."},
                                                   {"human": "Bye?", "assistant": "Goodbye."}]}],
         [[told("Be short."), *TWO]]),
    Case("columns human and assistant", [{"human": "Hi?", "assistant": "Hello."}], [HI], note="human.*assistant"),
    Case("xtuner: a list of turns a line", json.dumps(CHAT) + "\n" + json.dumps(CHAT + AGAIN) + "\n", [HI, TWO]),
    Case("a list of lists of turns", json.dumps([CHAT, CHAT + AGAIN], indent=1), [HI, TWO], file="rows.json"),
    Case("NeMo: roles with a capital", [{"conversations": [{"from": "User", "value": "Hi?"},
                                                           {"from": "Assistant", "value": "Hello."}]}], [HI]),
    Case("columns with a capital", [{"Prompt": "Hi?", "Completion": "Hello."}], [HI], note="Prompt.*Completion"),
    Case("the first turn is the assistant's", [{"messages": [{"role": "assistant", "content": "Welcome."}, *CHAT]}],
         [[say("Welcome."), *HI]], note="first turn"),
    Case("a system turn and the assistant's first",
         [{"conversations": [{"from": "system", "value": "Be short."}, {"from": "gpt", "value": "Welcome."},
                             {"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]}],
         [[told("Be short."), say("Welcome."), *HI]], note="first turn"),
    Case("a system turn later on",
         [{"messages": [*CHAT, {"role": "system", "content": "Be short."}, *AGAIN]}],
         [[*HI, told("Be short."), *TWO[2:]]], note="system turn"),
    Case("Open Assistant: messages of a tree", TREE, [TWO], note="tree"),
    Case("Open Assistant: realistic_seed_data.json",
         json.dumps([seed("a", None, "prompter", "Hi?"), seed("b", "a", "assistant", "Hello."),
                     seed("x", None, "prompter", "Who?"), seed("y", "x", "assistant", "Me."),
                     seed("c", "b", "prompter", "Bye?"), seed("d", "c", "assistant", "Goodbye."),
                     seed("e", "c", "assistant", "Second.")]),
         [TWO, [ask("Who?"), say("Me.")]], note="tree", file="rows.json"),
    Case("Open Assistant: a tree a line",
         [{"message_tree_id": "a", "tree_state": "ready_for_export", "prompt": {
             "message_id": "a", "role": "prompter", "text": "Hi?", "replies": [
                 {"message_id": "b", "role": "assistant", "text": "Worse.", "rank": 1, "replies": []},
                 {"message_id": "c", "role": "assistant", "text": "Hello.", "rank": 0, "replies": [
                     {"message_id": "d", "role": "prompter", "text": "Bye?", "replies": [
                         {"message_id": "e", "role": "assistant", "text": "Goodbye.", "replies": []}]}]}]}}],
         [TWO], note="tree"),
    Case("LMFlow: instances of text2text",
         json.dumps({"type": "text2text", "instances": [{"input": "Hi?", "output": "Hello."}] * 2}, indent=1),
         [HI, HI], file="rows.json"),
    Case("LMFlow: instances of conversations",
         json.dumps({"type": "conversation", "instances": [{"conversation_id": 1, "messages": CHAT}]}), [HI],
         file="rows.json"),
    Case("self-instruct: instances",
         [{"id": "seed_task_0", "name": "a", "instruction": "Answer.", "instances": [{"input": "Hi?",
                                                                                      "output": "Hello."}]}],
         [[ask("Answer.\n\nHi?"), say("Hello.")]]),
    Case("Dolly", [{"instruction": "Answer.", "context": "Hi?", "response": "Hello.", "category": "open_qa"},
                   {"instruction": "Hi?", "context": "", "response": "Hello.", "category": "open_qa"}],
         [[ask("Answer.\n\nHi?"), say("Hello.")], HI], note="response"),
    Case("ms-swift: query, response, history",
         [{"system": "Be short.", "query": "Bye?", "response": "Goodbye.", "history": [["Hi?", "Hello."]]}],
         [[told("Be short."), *TWO]], note="query.*response"),
    Case("torchtune: input, output", [{"input": "Hi?", "output": "Hello."}], [HI], note="input.*output"),
    Case("Alpaca with empty parts", [{"instruction": "", "input": "Hi?", "output": "Hello."},
                                     {"instruction": "Hi?", "input": "", "output": "Hello."}], [HI, HI]),
    Case("images beside a pair", [{"prompt": "Hi?", "chosen": "Good.", "rejected": "Bad.", "images": ["a.png"]}],
         "column 'images' is not empty", recipe="dpo"),
    Case("an image inside a pair",
         [{"chosen": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, GOOD[1]],
           "rejected": BAD}], "content other than text", recipe="dpo"),
    Case("KTO: instruction, output, label", [{"instruction": "Hi?", "output": "Hello.", "label": True}],
         "--loss_type kto"),
    Case("KTO: prompt, completion, label", [{"prompt": "Hi?", "completion": "Hello.", "label": False}],
         "--loss_type kto"),
    Case("KTO: LLaMA-Factory's kto_tag", [{"messages": CHAT, "kto_tag": True}], "--loss_type kto"),
]  # fmt: skip

# A second look, as the Hub has them.
MORE = [
    Case("UltraChat 200k", [{"prompt": "Hi?", "prompt_id": "a", "messages": CHAT}], [HI]),
    Case("UltraChat: strings in turn", [{"id": "0", "data": ["Hi?", "Hello.", "Bye?", "Goodbye."]}], [TWO],
         note="alternately"),
    Case("OpenHermes 2.5",
         [{"source": "a", "system_prompt": None, "custom_instruction": None, "title": None, "conversations": [
             {"from": "human", "value": "Hi?", "weight": None}, {"from": "gpt", "value": "Hello.", "weight": None}]}],
         [HI]),
    Case("OpenOrca", [{"id": "a", "system_prompt": "Be short.", "question": "Hi?", "response": "Hello."},
                      {"id": "b", "system_prompt": "", "question": "Hi?", "response": "Hello."}],
         [[told("Be short."), *HI], HI], note="question.*response"),
    Case("SlimOrca",
         [{"conversations": [{"from": "system", "value": "Be short.", "weight": None},
                             {"from": "human", "value": "Hi?", "weight": 0},
                             {"from": "gpt", "value": "Hello.", "weight": 1}]}], [[told("Be short."), *HI]]),
    Case("ShareGPT: human, bing and user",
         [{"id": "a", "conversations": [{"from": "human", "value": "Hi?"}, {"from": "bing", "value": "Hello."},
                                        {"from": "user", "value": "Bye?"}, {"from": "chatgpt", "value": "Goodbye."}]}],
         [TWO]),
    Case("ShareGPT: the last turn is the user's",
         [{"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."},
                             {"from": "human", "value": "Thanks!"}]}], [HI], note="user turns"),
    Case("Capybara", [{"source": "a", "conversation": [{"input": "Hi?", "output": "Hello."},
                                                      {"input": "Bye?", "output": "Goodbye."}], "id": "1"}], [TWO]),
    Case("LIMA: strings in turn", [{"conversations": ["Hi?", "Hello."], "source": "a"}], [HI], note="alternately"),
    Case("LMSYS-Chat-1M", [{"conversation_id": "a", "model": "m", "conversation": CHAT, "turn": 1,
                            "language": "English"}], [HI]),
    Case("WildChat", [{"conversation_hash": "a", "model": "m", "conversation": [
        {"role": "user", "content": "Hi?", "language": "English", "toxic": False, "turn_identifier": 1},
        {"role": "assistant", "content": "Hello.", "language": "English", "toxic": False, "turn_identifier": 1}]}],
         [HI]),
    Case("Magpie", [{"uuid": "a", "instruction": "Hi?", "response": "Hello.", "gen_input_configs": {"t": 1},
                     "conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]}], [HI]),
    Case("Magicoder-Evol: instruction, response", [{"instruction": "Hi?", "response": "Hello."}], [HI]),
    Case("WizardLM evol_instruct 196k", [{"idx": "a", "conversations": [{"from": "human", "value": "Hi?"},
                                                                       {"from": "gpt", "value": "Hello."}]}], [HI]),
    Case("no_robots", [{"prompt": "Hi?", "prompt_id": "a", "messages": CHAT, "category": "Chat"}], [HI]),
    Case("Tülu 3 mixture", [{"id": "a", "messages": CHAT, "source": "b"}], [HI]),
    Case("GSM8K", [{"question": "Hi?", "answer": "Hello."}], [HI]),
    Case("MATH: problem, solution", [{"problem": "Hi?", "level": "Level 1", "type": "Algebra", "solution": "Hello."}],
         [HI], note="problem.*solution"),
    Case("MATH-500: problem, solution, answer",
         [{"problem": "Hi?", "solution": "Hello.", "answer": "1", "subject": "Algebra", "level": 1, "unique_id": "a"}],
         [HI], note="problem.*solution"),
    Case("LIMO: question, solution, answer", [{"question": "Hi?", "solution": "It is one.", "answer": "1"}],
         "--columns answer=solution"),
    Case("MetaMathQA", [{"type": "a", "query": "Hi?", "original_question": "Ho?", "response": "Hello."}], [HI]),
    Case("OpenMathInstruct-2",
         [{"problem": "Hi?", "generated_solution": "Hello.", "expected_answer": "1", "problem_source": "a"}], [HI]),
    Case("NuminaMath-CoT", [{"source": "a", "problem": "Hi?", "solution": "Hello.", "messages": CHAT}], [HI]),
    Case("OpenThoughts", [{"system": "Think.", "conversations": [{"from": "user", "value": "Hi?"},
                                                               {"from": "assistant", "value": "Hello."}]}],
         [[told("Think."), *HI]]),
    Case("Magicoder-OSS: problem, solution", [{"lang": "python", "raw_index": 1, "index": 1, "seed": "x",
                                               "problem": "Hi?", "solution": "Hello."}], [HI]),
    Case("Alpaca-GPT4", [{"instruction": "Hi?", "input": "", "output": "Hello.", "text": "Below ... Hi? ... Hello."}],
         [HI]),
    Case("FLAN: inputs, targets", [{"inputs": "Hi?", "targets": "Hello.", "task": "a"}], [HI]),
    Case("CAMEL: message_1, message_2", [{"role_1": "a", "topic": "b", "message_1": "Hi?", "message_2": "Hello."}],
         [HI]),
    Case("medical Question, Answer", [{"Question": "Hi?", "Answer": "Hello."}], [HI]),
    Case("roles bot and ai", [{"messages": [{"role": "human", "content": "Hi?"}, {"role": "AI", "content": "Hello."},
                                            AGAIN[0], {"role": "bot", "content": "Goodbye."}]}], [TWO]),
    Case("Cohere: Chatbot", [{"messages": [{"role": "System", "content": "Be short."},
                                           {"role": "User", "content": "Hi?"},
                                           {"role": "Chatbot", "content": "Hello."}]}],
         [[told("Be short."), *HI]]),
    Case("ms-swift: tool_call and tool_response",
         [{"tools": json.dumps(WEATHER), "messages": [
             {"role": "user", "content": "Rain?"},
             {"role": "tool_call", "content": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
             {"role": "tool_response", "content": "no"}, {"role": "assistant", "content": "No."}]}],
         [[ask("Rain?"), say("", calls=[("weather", {"city": "Oslo"})]), ("tool", "no", False), say("No.")]]),
    Case("a conversation as JSON in CSV", 'messages,id\n"' + json.dumps(CHAT).replace('"', '""') + '",1\n', [HI],
         file="rows.csv"),
    Case("turns with the key text", [{"conversations": [{"role": "user", "text": "Hi?"},
                                                        {"role": "assistant", "text": "Hello."}]}], [HI]),
    Case("thinking as a part (Anthropic, Mistral)",
         [{"messages": [CHAT[0], {"role": "assistant", "content": [{"type": "thinking", "thinking": "I look."},
                                                                   {"type": "text", "text": "Hello."}]}]}],
         [[ask("Hi?"), say("Hello.", reasoning="I look.")]]),
    Case("tool_use as a part (Anthropic)",
         [{"tools": WEATHER, "messages": [
             {"role": "user", "content": "Rain?"},
             {"role": "assistant", "content": [{"type": "text", "text": "I look."},
                                               {"type": "tool_use", "id": "a", "name": "weather",
                                                "input": {"city": "Oslo"}}]},
             {"role": "tool", "content": "no"}, {"role": "assistant", "content": "No."}]}],
         [[ask("Rain?"), say("I look.", calls=[("weather", {"city": "Oslo"})]), ("tool", "no", False), say("No.")]]),
    Case("xtuner: system, input, output; one without loss",
         [{"conversation": [{"system": "Be short.", "input": "Hi?", "output": "Hello.", "output_with_loss": False},
                            {"input": "Bye?", "output": "Goodbye."}]}],
         [[told("Be short."), ask("Hi?"), say("Hello.", False), *TWO[2:]]]),
    Case("an object with a list of rows", json.dumps({"version": 1, "data": [{"question": "Hi?", "answer": "Hello."}]},
                                                     indent=1), [HI], file="rows.json"),
    Case("UltraFeedback binarized",
         [{"prompt": "Hi?", "prompt_id": "a", "chosen": GOOD, "rejected": BAD, "messages": GOOD, "score_chosen": 8.5,
           "score_rejected": 3.0}], [PAIR], recipe="dpo"),
    Case("HH-RLHF",
         [{"chosen": "\n\nHuman: Hi?\n\nAssistant: Good.", "rejected": "\n\nHuman: Hi?\n\nAssistant: Bad."}], [PAIR],
         recipe="dpo"),
    Case("HH-RLHF with its prompt apart",
         [{"prompt": "\n\nHuman: Ho?\n\nAssistant: Ho.\n\nHuman: Hi?\n\nAssistant:", "chosen": " Good.",
           "rejected": " Bad."}],
         [([ask("Ho?"), say("Ho.", False), *PAIR[0]], [ask("Ho?"), say("Ho.", False), *PAIR[1]])], recipe="dpo"),
    Case("Intel's Orca DPO pairs", [{"system": "Be short.", "question": "Hi?", "chosen": "Good.", "rejected": "Bad."}],
         [([told("Be short."), *PAIR[0]], [told("Be short."), *PAIR[1]])], recipe="dpo"),
    Case("Argilla's Orca DPO pairs: input", [{"system": "", "input": "Hi?", "chosen": "Good.", "rejected": "Bad.",
                                             "status": "unchanged", "generations": ["a", "b"]}], [PAIR], recipe="dpo"),
    Case("Argilla's dpo-mix-7k", [{"dataset": "a", "chosen": GOOD, "rejected": BAD, "chosen_rating": 5.0,
                                   "rejected_rating": 1.0}], [PAIR], recipe="dpo"),
    Case("Argilla's capybara-dpo",
         [{"source": "a", "conversation": [{"input": "Hi?", "output": "Good."}], "original_response": "Bad.",
           "chosen": GOOD, "rejected": BAD, "rating_chosen": 5}], [PAIR], recipe="dpo"),
    Case("SHP", [{"post_id": "a", "history": "Hi?", "human_ref_A": "Good.", "human_ref_B": "Bad.", "labels": 1,
                  "score_A": 9, "score_B": 2},
                 {"post_id": "a", "history": "Hi?", "human_ref_A": "Bad.", "human_ref_B": "Good.", "labels": 0,
                  "score_A": 2, "score_B": 9}], [PAIR, PAIR], note="labels", recipe="dpo"),
    Case("WebGPT comparisons",
         [{"question": {"dataset": "a", "full_text": "Hi?"}, "answer_0": "Bad.", "answer_1": "Good.", "score_0": -1.0,
           "score_1": 1.0}], [PAIR], note="score_0", recipe="dpo"),
    Case("PKU-SafeRLHF: better_response_id",
         [{"prompt": "Hi?", "response_0": "Bad.", "response_1": "Good.", "better_response_id": 1,
           "safer_response_id": 0}], [PAIR], note="better_response_id", recipe="dpo"),
    Case("Chatbot Arena: conversation_a, conversation_b",
         [{"question_id": "a", "winner": "model_a", "conversation_a": GOOD, "conversation_b": BAD}], [PAIR],
         note="winner", recipe="dpo"),
    Case("HelpSteer3: context, response1, response2",
         [{"context": [CHAT[0]], "response1": "Good.", "response2": "Bad.", "overall_preference": -2},
          {"context": [CHAT[0]], "response1": "Bad.", "response2": "Good.", "overall_preference": 1}], [PAIR, PAIR],
         note="overall_preference", recipe="dpo"),
    Case("Nectar: a ranking", [{"prompt": "\n\nHuman: Hi?\n\nAssistant: ", "answers": [
        {"answer": "Bad.", "rank": 7.0}, {"answer": "Good.", "rank": 1.0}, {"answer": "Fair.", "rank": 3.0}]}],
         r"answers.*rank", recipe="dpo"),
    Case("UltraFeedback: completions with scores",
         [{"instruction": "Hi?", "models": ["a", "b"], "completions": [
             {"response": "Good.", "overall_score": 8.0}, {"response": "Bad.", "overall_score": 2.0}]}],
         r"completions.*score|score.*completions", recipe="dpo"),
    Case("Skywork: whole conversations", [{"chosen": GOOD, "rejected": BAD, "source": "a"}], [PAIR], recipe="dpo"),
    Case("truthy-dpo", [{"id": "a", "source": "b", "system": "", "prompt": "Hi?", "chosen": "Good.",
                         "rejected": "Bad."}], [PAIR], recipe="dpo"),
    Case("a chosen column in SFT", [{"prompt": "Hi?", "chosen": "Good.", "rejected": "Bad."}], "preference data"),
    Case("two questions and two answers", [{"query": "Hi?", "question": "Ho?", "response": "a", "target": "b"}],
         "--columns"),
    Case("text only", [{"text": "Hello."}], [[("text", "Hello.", True)]]),
]  # fmt: skip

OSLO = {"city": "Oslo"}
CALLED = ("assistant", "", True, {"calls": [("weather", OSLO)]})
ASKED_TOOL = [ask("Hi?"), CALLED, ("tool", "cold", False), say("Hello.")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FLAT = {"name": "weather", "arguments": OSLO}
BARE = [{"name": "weather", "description": "Get it.", "parameters": SCHEMA}]
LIST = {"role": "assistant", "content": "Hello."}


def called(*turns, **row):
    return [{"messages": [CHAT[0], *turns, CHAT[1]], **row}]


def anthropic(result, *more):
    return called(
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": OSLO}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": result}, *more]},
        tools=[{"name": "weather", "input_schema": SCHEMA}],
    )


def gemini(call, result, system="systemInstruction"):
    return [
        {
            system: {"parts": [{"text": "Be kind."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "Hi?"}]},
                {"role": "model", "parts": [{call: {"name": "weather", "args": OSLO}}]},
                {"role": "user", "parts": [{result: {"name": "weather", "response": {"sky": "cold"}}}]},
                {"role": "model", "parts": [{"text": "Hello."}]},
            ],
            "tools": [{"functionDeclarations": BARE}],
        }
    ]


OF_APIS = [
    Case("Anthropic: a tool's result as text", anthropic("cold"), [ASKED_TOOL], note="OpenAI's form"),
    Case("Anthropic: a tool's result in parts", anthropic([{"type": "text", "text": "cold"}]), [ASKED_TOOL]),
    Case("Anthropic: a question behind a tool's result", anthropic("cold", {"type": "text", "text": "And?"}),
         [[*ASKED_TOOL[:3], ask("And?"), say("Hello.")]]),
    Case("Anthropic: an image as a tool's result", anthropic([{"type": "image", "source": {}}]), r"turn 3.*'image'"),
    Case("Llama 3: a flat call, ipython",
         called({"role": "assistant", "content": "", "tool_calls": [FLAT]}, {"role": "ipython", "content": "cold"},
                tools=BARE), [ASKED_TOOL], note="OpenAI's form"),
    Case("Llama 3: a flat call with parameters",
         called({"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "parameters": OSLO}]},
                {"role": "ipython", "content": "cold"}, tools=BARE), [ASKED_TOOL]),
    *(Case(f"Gemini: contents of parts, {call}", gemini(call, result, system),
           [[told("Be kind."), ask("Hi?"), CALLED, ("tool", '{"sky": "cold"}', False), say("Hello.")]], note="contents")
      for call, result, system in (("functionCall", "functionResponse", "systemInstruction"),
                                   ("function_call", "function_response", "system_instruction"))),
    Case("Gemini: a file", [{"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "a"}}]}, LIST]}],
         "fileData"),
    Case("Bedrock: texts without a type, system as a list",
         [{"system": [{"text": "Be kind."}], "messages": [{"role": "user", "content": [{"text": "Hi?"}]},
                                                          {"role": "assistant", "content": [{"text": "Hello."}]}]}],
         [[told("Be kind."), *HI]]),
    Case("Bedrock: toolUse and toolResult",
         called({"role": "assistant", "content": [
                    {"toolUse": {"toolUseId": "t", "name": "weather", "input": OSLO}}]},
                {"role": "user", "content": [{"toolResult": {"toolUseId": "t", "content": [{"text": "cold"}]}}]}),
         [ASKED_TOOL]),
    Case("OpenAI: preferences", [{"input": {"messages": [CHAT[0]], "tools": [], "parallel_tool_calls": True},
                                  "preferred_output": [GOOD[1]], "non_preferred_output": [BAD[1]]}], [PAIR],
         recipe="dpo"),
    Case("OpenAI: preferences in SFT", [{"input": {"messages": [CHAT[0]]}, "preferred_output": [GOOD[1]],
                                         "non_preferred_output": [BAD[1]]}], "preference data.*make dpo"),
    Case("OpenAI: a batch's requests", [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
                                         "body": {"model": "m", "messages": [CHAT[0]]}}],
         "batch API without its answer"),
    Case("OpenAI: a batch's answers", [{"id": "b", "custom_id": "a", "response": {"body": {"choices": [
        {"message": CHAT[1]}]}}, "error": None}], "batch API without its question"),
    Case("a log of requests", [{"request": {"messages": [CHAT[0]]},
                                   "response": {"choices": [{"message": CHAT[1]}]}}] * 2,
         "a log of requests: write `messages`"),
    Case("several rejected answers", [{"prompt": "Hi?", "chosen": "Good.", "rejected": ["Bad.", "Worse."]}],
         "'rejected' holds 2 answers.*write one row per answer", recipe="dpo"),
    Case("one rejected answer in a list", [{"prompt": "Hi?", "chosen": "Good.", "rejected": ["Bad."]}], [PAIR],
         recipe="dpo"),
    Case("ms-swift: several rejected answers", [{"messages": GOOD, "rejected_response": ["Bad.", "Worse."]}],
         "'rejected_response' holds 2 answers", recipe="dpo"),
    Case("several rejected conversations", [{"prompt": "Hi?", "chosen": [GOOD[1]], "rejected": [[BAD[1]], [BAD[1]]]}],
         "'rejected' holds 2 answers", recipe="dpo"),
    Case("xLAM: query, answers, tools", [{"query": "Hi?", "answers": json.dumps([FLAT]), "tools": json.dumps(BARE)}],
         "`answers` are tool calls"),
    Case("rows under keys", [{"0": {"prompt": "a", "completion": "b"}, "1": {"prompt": "c", "completion": "d"}}],
         "rows as its values"),
    Case("splits in an object", [{"train": [{"prompt": "a", "completion": "b"}],
                                  "test": [{"prompt": "c", "completion": "d"}]}],
         "lists of rows: write each list to a separate file .train, test"),
    Case("a row under a key", [{"data": {"messages": CHAT}}], "the row is under the key 'data'"),
    Case("an answer that is null", [{"messages": [CHAT[0], {"role": "assistant", "content": None}]}],
         "the content of turn 2 must be a string, found null"),
    Case("an answer that is a number", [{"question": "2+2?", "answer": 4}],
         "'answer' must be a string, found a number"),
    Case("an answer that is true", [{"question": "2+2?", "answer": True}], "must be a string, found true"),
    Case("an answer that is an object", [{"question": "2+2?", "answer": {"a": 1}}],
         "must be a string, found an object"),
]  # fmt: skip

CASES = LISTED + MORE + OF_APIS
