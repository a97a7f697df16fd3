"""Preference pairs: each form gives the tokens that its two chats have alone, and nothing else reads as one."""

from __future__ import annotations

import gzip
import json

import pytest

from dynamic_cp.errors import DataError, InvalidInputError
from dynamic_cp.types import SharedQuestion
from megatron.integrations.preferences import preference_pairs
from megatron.trainer.data.tokenizer import ByteTokenizer
from tests.unit.data.helpers import write_records
from tests.unit.data.test_chat import flags, reader_of, tokens_of
from tests.unit.data.test_chat_records import call_messages

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it far?"}]
NO, YES = ({"role": "assistant", "content": text} for text in ("No.", "Yes, it is."))
EARLIER = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}, *PROMPT[1:]]


TEXTS = {"chosen": "No.", "rejected": "Yes, it is."}
ANSWERS = {"chosen": [NO], "rejected": [YES]}


def whole(messages):
    return {"chosen": [*messages, NO], "rejected": [*messages, YES]}


BRIEF = {"system": "Be brief."}
SPOKEN = {"human": ["Is it far?"], "gpt": ["No.", "Yes, it is."]}
HUMAN, GPT = ([{"from": name, "value": text} for text in texts] for name, texts in SPOKEN.items())
SHAREGPT = {"conversations": HUMAN, "chosen": GPT[0], "rejected": GPT[1]}
FORMS = {
    "messages": ({"prompt": PROMPT, **ANSWERS}, PROMPT),
    "texts of answers": ({"prompt": PROMPT, **TEXTS}, PROMPT),
    "whole chats": ({**whole(PROMPT), "prompt": None}, PROMPT),
    "whole chats and their question": ({"prompt": "Is it far?", **whole(PROMPT), "messages": [*PROMPT, NO]}, PROMPT),
    "a question and messages": ({"prompt": "Is it far?", **ANSWERS}, PROMPT[1:]),
    "an answer before": (whole(EARLIER), EARLIER),
    "sharegpt": (SHAREGPT | BRIEF, PROMPT),
    "alpaca": ({"instruction": "Is it", "input": "far?", **TEXTS}, [{"role": "user", "content": "Is it\nfar?"}]),
    "alpaca and whole chats": ({"instruction": "Is it far?", "output": "", **whole(PROMPT[1:])}, PROMPT[1:]),
    "texts and a system": ({"prompt": "Is it far?", **TEXTS, **BRIEF}, PROMPT),
    "messages and a system": ({"prompt": PROMPT[1:], **ANSWERS, **BRIEF}, PROMPT),
    "whole chats and a system": (whole(PROMPT[1:]) | BRIEF, PROMPT),
    "a prompt that chats repeat": ({"prompt": PROMPT, **whole(PROMPT)}, PROMPT),
    "a question that chats repeat": ({"prompt": PROMPT, **whole(PROMPT[1:])}, PROMPT),
    "the last question of whole chats": ({"prompt": EARLIER[2:], **whole(EARLIER)}, EARLIER),
    "a system that chats follow": ({"prompt": PROMPT[:1], **whole(PROMPT[1:])}, PROMPT),
}


def pairs(path, *records, **words):
    return [*preference_pairs(str(write_records(path, *records)), ByteTokenizer(), **words)]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_tokens_of_its_two_chats(tmp_path, form):
    record, prompt = FORMS[form]
    (pair,) = pairs(tmp_path / "a.jsonl", record)
    for tokens, is_target, answer in (
        (pair.chosen, pair.chosen_is_target, NO),
        (pair.rejected, pair.rejected_is_target, YES),
    ):
        chat = [message | {"weight": 0} if message["role"] == "assistant" else message for message in prompt]
        alone, learned = tokens_of(reader_of(flags()), json.dumps({"messages": [*chat, answer]}).encode())
        assert bytes(tokens.tolist()) == bytes(alone[: len(tokens)].tolist())
        assert is_target.tolist() == learned[: len(tokens)].tolist()
        assert not learned[len(tokens) :].any()
        assert int(is_target.argmax()) == pair.prompt_length
        assert bytes(tokens[pair.prompt_length :].tolist()).decode() == answer["content"] + "<|im_end|>"


@pytest.mark.parametrize("prompt", ["Is it far?", PROMPT[1:]])
def test_answers_that_begin_alike_stay_behind_their_prompt(tmp_path, prompt):
    chats = [[{"role": "assistant", "content": "Sure."}, *EARLIER[:1], answer] for answer in (NO, YES)]
    (pair,) = pairs(tmp_path / "a.jsonl", {"prompt": prompt, "chosen": chats[0], "rejected": chats[1]})
    alone, learned = tokens_of(reader_of(flags()), json.dumps({"messages": [*PROMPT[1:], *chats[0]]}).encode())
    assert pair.chosen.tolist() == alone[: len(pair.chosen)].tolist()
    assert pair.chosen_is_target.tolist() == learned[: len(pair.chosen)].tolist()


TEXT_PAIRS = [  # a line, its prompt and its answers
    ({"prompt": "Is it far?", "chosen": " No.", "rejected": " Yes."}, ("Is it far?", " No.", " Yes.")),
    ({"chosen": "Is it far? No.", "rejected": "Is it far? Yes."}, ("Is it far?", " No.", " Yes.")),
    ({"chosen": "Is it far? No.", "rejected": "Is it far? Not."}, ("Is it far? No", ".", "t.")),
]


@pytest.mark.parametrize(("record", "expected"), TEXT_PAIRS)
def test_texts_are_a_prompt_and_two_answers(tmp_path, record, expected):
    (pair,) = pairs(tmp_path / "a.jsonl", record)
    for tokens, answer in ((pair.chosen, expected[1]), (pair.rejected, expected[2])):
        assert tokens[-1] == ByteTokenizer().eod
        assert bytes(tokens[: pair.prompt_length].tolist()).decode() == expected[0]
        assert bytes(tokens[pair.prompt_length : -1].tolist()).decode() == answer


@pytest.mark.nightly  # it takes seconds to import
def test_trl_reads_texts_so():
    data_utils = pytest.importorskip("trl.data_utils", reason="compares with TRL")
    for record, expected in TEXT_PAIRS:
        found = data_utils.maybe_extract_prompt(record)
        assert tuple(found[name] for name in ("prompt", "chosen", "rejected")) == expected


def test_answers_of_several_messages_and_files_of_all_kinds(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}.{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    long, short = call_messages("{}"), [*call_messages("{}")[:1], NO]
    records = [{"chosen": long, "rejected": short}, {"chosen": short, "rejected": long}]
    first, second = pairs(tmp_path / "a.jsonl", *records, chat_template=str(template))
    assert bytes(first.chosen.tolist()) == b"<user>2 plus 3?<assistant>add.<tool>5<assistant>5.."
    assert bytes(first.chosen[first.chosen_is_target].tolist()) == b"add.5.."
    tokens, mask = first.sample()
    lengths = [len(first.chosen) - first.prompt_length, len(first.rejected) - first.prompt_length]
    assert mask == SharedQuestion(first.prompt_length - 1, (lengths[0], lengths[1]))
    assert bytes(tokens.labels[tokens.loss_mask > 0].tolist()) == b"add.5..No.."
    assert bytes(tokens.tokens[-lengths[1] :].tolist()) == b">" + bytes(
        first.rejected[first.prompt_length : -1].tolist()
    )
    assert len(tokens.tokens) == mask.prompt + sum(lengths)
    assert second.rejected.tolist() == first.chosen.tolist()
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(json.dumps(records).encode()))
    arrays = [*preference_pairs(str(tmp_path / "b.json.gz"), ByteTokenizer(), chat_template=str(template))]
    assert [pair.chosen.tolist() for pair in arrays] == [first.chosen.tolist(), second.chosen.tolist()]


def test_variables_and_unread_keys_of_a_pair(tmp_path, caplog):
    template = tmp_path / "t.jinja"
    template.write_text("{{ mode }}{% for m in messages %}<{{ m.role }}>{{ m.content }}.{% endfor %}")
    record = FORMS["messages"][0] | {"chat_template_kwargs": {"mode": "short"}, "score_chosen": 1, "id": 2}
    first, _ = pairs(tmp_path / "a.jsonl", record, record, chat_template=str(template))
    assert bytes(first.chosen.tolist()).startswith(b"short<system>Be brief.")
    (said,) = caplog.messages
    assert said.endswith("a.jsonl line 1 has the key 'score_chosen', which has no effect; this is said once")
    pairs(tmp_path / "a.jsonl", {"prompt": "ab", "chosen": "c", "rejected": "d", "score": 1})
    assert "'score'" in caplog.messages[1]


BAD = {
    "no preference": (
        {"prompt": "ab", "completion": "c"},
        "has no field 'chosen' (it has 'prompt', 'completion'): preferences are read (chosen with rejected, "
        "prompt with chosen with rejected",
    ),
    "alike": ({"prompt": PROMPT, "chosen": [NO], "rejected": [NO]}, "'chosen' and 'rejected' are the same"),
    "texts alike": ({"chosen": "abc", "rejected": "abc"}, "'chosen' and 'rejected' are the same"),
    "nothing before": ({"chosen": [NO], "rejected": [YES]}, "have no message in common and no 'prompt' precedes them"),
    "two prompts": (
        {"prompt": PROMPT, "instruction": "x", "chosen": "a", "rejected": "b"},
        "has 'prompt' with 'chosen' with 'rejected' and 'instruction' with 'chosen' with 'rejected': leave one",
    ),
    "an output": (
        {"instruction": "x", "output": "y", "chosen": "a", "rejected": "b"},
        "has 'output' beside 'chosen' and 'rejected': leave 'output' out",
    ),
    "two systems": (
        {"system": "Be long.", "prompt": PROMPT, "chosen": "a", "rejected": "b"},
        "field 'system' differs from the chat's own system message",
    ),
    "a system alone": (
        {"system": "Be brief.", "chosen": "Far? No.", "rejected": "Far? Yes."},
        "have no message in common and no 'prompt' precedes them",
    ),
    "a prompt by another name": (
        {"system": "Be brief.", "question": "Far?", "chosen": "It is not.", "rejected": "It is."},
        "have no message in common and no 'prompt' precedes them: rename 'question' to 'prompt'",
    ),
    "texts that begin otherwise": (
        {"chosen": "No.", "rejected": "Yes."},
        "have no message in common and no 'prompt' precedes them: repair or remove the line",
    ),
    "no answer": ({"prompt": PROMPT, "chosen": PROMPT[1:], "rejected": [YES]}, "has no assistant message to learn"),
    "role": ({"prompt": "?", "chosen": [{"role": "me", "content": ""}], "rejected": [YES]}, "message 1 has role 'me'"),
    "a short prompt": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "its prompt has 1 tokens, at least 2"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_pair_names_its_line(tmp_path, case):
    record, says = BAD[case]
    with pytest.raises(DataError) as caught:
        pairs(tmp_path / "a.jsonl", FORMS["messages"][0], record)
    assert f"{tmp_path / 'a.jsonl'} line 2" in str(caught.value)
    assert says in str(caught.value)


def test_files_without_records_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InvalidInputError, match="has no records: preference pairs are read from JSONL"):
        next(preference_pairs(str(tmp_path / "a.txt"), ByteTokenizer()))
