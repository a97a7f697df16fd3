"""Chat templates as models release them (those TRL ships): text and loss are those of transformers, for ten kinds of
chats, or the chat is refused where a text leaves out what somebody says."""

import datetime
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest

from megatron.trainer.data.lines import LineError
from megatron.trainer.data.tokenizer import build
from tests.unit.data.helpers import config
from tests.unit.data.made_tokenizers import train_tokenizer

TODAY = "2026-11-25"
_SPEC = importlib.util.find_spec("trl")
FOLDER = Path(_SPEC.origin).parent / "chat_templates" if _SPEC and _SPEC.origin else None
FILES = {path.stem: path for path in sorted(FOLDER.glob("*.jinja"))} if FOLDER else {}
MARKER = re.compile(r"<[^<>\s{}%'\"]+>|\[[A-Za-z/]+\]")
# They write the parts of a content alone: of a text nothing, or an error.
READ_PARTS = ("idefics3", "llava_next", "smolvlm")
# They end a chat, but not its earlier turns, with eos_token, too.
END_TEXTS = ("phi3", "phi3_5")
# They end no turn: the next role does. TRL's own template of that model learns its token, and writes it last.
END_NO_TURN = {"glm4moe": "glm4moe_training"}

# Behind a call with words beside it, they write the result and the answer as one turn that has no prompt.
SAY_TOO_LITTLE = ("diffusion_gemma", "gemma4_v5")

# Of each kind above one; with marks; with a date.
KINDS_OF_TEMPLATES = ("phi3", "glm4moe", "gemma4_v5", "smolvlm", "qwen3_training", "llama3_1")
BY_DAY = [name for name in KINDS_OF_TEMPLATES if name in FILES]
pytestmark = pytest.mark.skipif(not FILES, reason="trl, whose templates these are, is not installed")


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def reasoning(key):
    return [
        user("What is 2 plus 3?"),
        assistant("It is 5.", **{key: "Two, then three."}),
        user("And 6?"),
        assistant("It is 11.", **{key: "Five, then six."}),
    ]


CALL = {"type": "function", "id": "c1", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
NUMBERS = {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer", "description": "another"}}
PARAMETERS = {"type": "object", "properties": NUMBERS, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "5"}
KINDS = {
    "question": [user("What is 2 plus 3?"), assistant("It is 5.")],
    "system": [{"role": "system", "content": "Be brief."}, user("What is 2 plus 3?"), assistant("It is 5.")],
    "turns": [user("Hello?"), assistant("Hi."), user("2 plus 3?"), assistant("5."), user("And 6?"), assistant("11.")],
    "reasoning_content": reasoning("reasoning_content"),
    "reasoning": reasoning("reasoning"),
    "thinking": reasoning("thinking"),
    "tools": [
        *(user("What is 2 plus 3?"), assistant(None, tool_calls=[CALL]), RESULT, assistant("It is 5.")),
        *(user("Thanks."), assistant("Welcome.")),
    ],
    "said": [user("What is 2 plus 3?"), assistant("Let me see.", tool_calls=[CALL]), RESULT, assistant("It is 5.")],
    "consecutive": [user("Hello?"), assistant("Hi there."), assistant("How are you?")],
    "unanswered": [user("Hello?"), assistant("Hi there."), user("And you?"), assistant(""), user("Well?")],
}


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory):
    markers = {marker for path in FILES.values() for marker in MARKER.findall(path.read_text())}
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["<bos>", "<eos>", *sorted(markers - {"<bos>", "<eos>"})], 900).save(str(path))
    return path.read_text()


class Today(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(TODAY)


@pytest.fixture
def transformers(monkeypatch):
    # Older ones hand null keys on and know one name of reasoning.
    transformers = pytest.importorskip("transformers", minversion="5.23")
    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Today)
    return transformers


def folder_of(tmp_path, tokenizer_json, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "tokenizer.json").write_text(tokenizer_json)
    (folder / "chat_template.jinja").write_text(FILES[name].read_text())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


def reader_of(folder):
    from megatron.trainer.data.chat_reader import build_chat_reader

    made = {"tokenizer": "HuggingFaceTokenizer", "tokenizer_model": folder}
    flags = config("x", sft=True, overlong="error", chat_date=TODAY, **made)
    return build_chat_reader(flags, build(flags))


def in_parts(messages):
    contents = [message["content"] for message in messages]
    parts = [text if text is None else [{"type": "text", "text": text}] for text in contents]
    return [message | {"content": of} for message, of in zip(messages, parts, strict=True)]


class Judge:
    """What transformers makes of a chat, and what of it is learned: tokens, each with all tokens before it."""

    def __init__(self, transformers, folder, *, twin=None, ends_texts=False):
        self.theirs = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.marks = re.search(r"%-?\s*generation\s*-?%", self.theirs.chat_template)
        self.twin, self.ends_texts = twin, ends_texts

    def ids(self, messages, tools, **options):
        return list(self.theirs.apply_chat_template(messages, tools=tools, return_dict=True, **options)["input_ids"])

    def texts(self, messages, tools):
        """Return all texts that a document may be: the chat, and the chat up to the end of each answer."""
        return [self.ids(messages, tools), *(self.answered(messages, turn, tools) for turn in self.turns(messages))]

    def leaves_out(self, messages, tools):
        """Return whether a message says something that is not in the text that it is learned in."""
        function = {"name": "multiply", "arguments": {"one": 271, "other": 314}}  # words that no schema has
        other = [
            {**one, "tool_calls": [{**CALL, "function": function}]} if "tool_calls" in one else one for one in messages
        ]
        for turn, message in enumerate(messages):
            behind = len(other) if self.marks or message["role"] != "assistant" else turn + 1
            text = self.theirs.apply_chat_template(other[:behind], tools=tools, tokenize=False)
            said = [message[key] for key in ("content", "reasoning_content", "reasoning", "thinking") if key in message]
            said = [one[0]["text"] if isinstance(one, list) else one or "" for one in said]
            said += ["multiply", "one", "271", "other", "314"] if "tool_calls" in message else []
            if not all(one in text for one in said):
                return True
        return False

    def turns(self, messages):
        return [turn for turn, one in enumerate(messages) if one["role"] == "assistant"]

    def answered(self, messages, turn, tools):
        """Return the chat up to the end of an answer: if its template has none, what the twin learns last."""
        ids = self.ids(messages[: turn + 1], tools)
        return [*ids, self.twin.ids(messages[: turn + 1], tools)[-1]] if self.twin else ids

    def learned(self, messages, tools):
        if self.marks:
            marked = {"return_dict": True, "return_assistant_tokens_mask": True}
            found = self.theirs.apply_chat_template(messages, tools=tools, **marked)
            return pairs(list(found["input_ids"]), found["assistant_masks"])
        return set().union(*(self.of_turn(messages, turn, tools) for turn in self.turns(messages)))

    def of_turn(self, messages, turn, tools):
        ids = self.answered(messages, turn, tools)
        if self.ends_texts and turn + 1 < len(messages):
            assert self.theirs.decode(ids.pop()) == "<eos>"
        start, stop = self.start(messages, turn, tools, ids), len(ids)
        while stop > start and not self.theirs.decode([ids[stop - 1]]).strip():
            stop -= 1
        return pairs(ids, [start <= place < stop for place in range(len(ids))])

    def start(self, messages, turn, tools, ids):
        """Return how much of the generation prompt a text has, also where earlier messages have another text there."""
        prompt, before = self.ids(messages[:turn], tools, add_generation_prompt=True), self.ids(messages[:turn], tools)
        if len(shared(prompt, ids)) >= len(shared(prompt, before)):
            return len(shared(prompt, ids))
        cue = prompt[len(shared(prompt, before)) :]
        cue_ends = [end for end in range(len(cue), len(ids)) if ids[end - len(cue) : end] == cue]
        return max(len(shared(before, ids)), *cue_ends)


def shared(first, second):
    return [one for one, _ in itertools.takewhile(lambda two: two[0] == two[1], zip(first, second, strict=False))]


def pairs(ids, mask):
    return {(tuple(ids[:place]), ids[place]) for place in range(len(ids)) if mask[place]}


@pytest.mark.by_day(*BY_DAY)
@pytest.mark.parametrize("name", FILES)
def test_texts_and_loss_are_those_of_transformers(tmp_path, transformers, tokenizer_json, name):
    twin = None
    if name in END_NO_TURN:
        twin = Judge(transformers, folder_of(tmp_path, tokenizer_json, END_NO_TURN[name]))
    folder = folder_of(tmp_path, tokenizer_json, name)
    judge, reader = Judge(transformers, folder, twin=twin, ends_texts=name in END_TEXTS), reader_of(folder)
    num_accepted = 0
    for kind, messages in KINDS.items():
        tools = [TOOL] if kind in ("tools", "said") else None
        theirs = in_parts(messages) if name.removesuffix("_training") in READ_PARTS else messages
        refused = None
        try:
            texts, expected = judge.texts(theirs, tools), judge.learned(theirs, tools)
        except Exception as error:
            refused = re.escape(str(error))
        if refused is None and judge.leaves_out(theirs, tools):
            refused = r"leaves out its (call|content|reasoning)"
        elif refused is None and kind == "said" and name in SAY_TOO_LITTLE:
            refused = "which does not say where the answer begins"
        if refused is not None:
            with pytest.raises(LineError, match=refused):
                reader.chat_format.texts(messages, {"tools": tools})
            continue
        num_accepted += 1
        found = [reader.tokens(text) for text in reader.chat_format.texts(messages, {"tools": tools})]
        assert all(one.tokens.tolist() in texts for one in found), kind
        learned = [pairs(one.tokens.tolist(), one.is_target) for one in found]
        assert set().union(*learned) == expected, kind
        assert sum(map(len, learned)) == len(expected), f"{kind}: a token is learned twice"
    assert num_accepted >= 3


THINKING = [name for name, path in FILES.items() if "enable_thinking" in path.read_text()]


@pytest.mark.by_day("one")
@pytest.mark.parametrize("names", [["qwen3_8"], THINKING], ids=["one", "all"])
def test_variables_of_a_record_reach_released_templates(tmp_path, transformers, tokenizer_json, names):
    changed = set()
    for name in names:
        folder, messages = folder_of(tmp_path, tokenizer_json, name), KINDS["question"]
        theirs, chat_format = Judge(transformers, folder).theirs, reader_of(folder).chat_format
        ours = {}
        for thinks in (True, False):
            prompt = chat_format._render(messages[:1], {"enable_thinking": thinks}, add_generation_prompt=True)
            options = {"tokenize": False, "enable_thinking": thinks}
            assert prompt == theirs.apply_chat_template(messages[:1], add_generation_prompt=True, **options)
            ((ours[thinks], _),) = chat_format.texts(messages, {"enable_thinking": thinks})
            assert ours[thinks].startswith(theirs.apply_chat_template(messages, **options).rstrip())
            changed |= {name} if len({prompt, *ours.values()}) > 2 else set()
    assert changed


def test_all_released_templates_are_looked_at():
    assert len(FILES) >= 61
    assert len(BY_DAY) == len(KINDS_OF_TEMPLATES)


@pytest.mark.by_day(*BY_DAY[-2:])
@pytest.mark.parametrize("name", FILES)
def test_arguments_that_are_json_text_are_written_as_arguments(name, tmp_path, tokenizer_json):
    reader = reader_of(folder_of(tmp_path, tokenizer_json, name))

    def written(arguments):
        """Return the tokens, or why there are none."""
        call = {**CALL, "function": {"name": "add", "arguments": arguments}}
        chat = [user("What is 2 plus 3?"), assistant(None, tool_calls=[call]), RESULT, assistant("It is 5.")]
        line = json.dumps({"messages": chat, "tools": [TOOL]}).encode()
        try:
            return [one.tokens.tolist() for one in reader.read(line)]
        except LineError as error:
            return str(error)

    as_text, as_objects = written('{"a": 2, "b": 3}'), written({"a": 2, "b": 3})
    assert as_text == as_objects or ("concatenate str" in as_objects and isinstance(as_text, list))
