from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune_bench import tokens
from kvtune_bench.engine_chain import Chain
from kvtune_connector.fingerprint import fingerprint, verified_prefix

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=80)
roles = st.sampled_from(["system", "user", "assistant", "tool", "critic"])
contents = st.one_of(
    texts,
    st.none(),
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=3),
)
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": contents}), min_size=1, max_size=5)


@given(messages, messages)
def test_longer_history_begins_with_the_shorter(history: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    short = tokens.render_chat(history, add_generation_prompt=False)
    assert tokens.render_chat(history + more, add_generation_prompt=False).startswith(short)
    assert len(short) % tokens.TOKEN_BYTES == 0


@given(messages, st.integers(1, 200), st.booleans(), st.booleans())
def test_history_with_the_answer_begins_with_what_decode_holds(
    history: list[dict[str, Any]], max_tokens: int, reasoning: bool, tool_call: bool
) -> None:
    prompt = tokens.render_chat(history)
    try:
        answer = tokens.answer(tokens.answer_seed(prompt), max_tokens, reasoning=reasoning, tool_call=tool_call)
    except tokens.PromptError:
        assert tool_call and max_tokens < 2 * tokens.MIN_TOOL_CALL_TOKENS
        return
    assert len(answer.tokens) == max_tokens * tokens.TOKEN_BYTES
    message = {
        "role": "assistant",
        "content": answer.content,
        "reasoning_content": answer.reasoning,
        "tool_calls": [{"index": 0, **call} for call in answer.tool_calls],
    }
    question = {"role": "user", "content": "and then?"}
    assert tokens.render_chat([*history, message, question]).startswith(prompt + answer.tokens)
    if answer.tool_calls:
        orjson.loads(answer.tool_calls[0]["function"]["arguments"])


def test_reasoning_that_is_not_sent_back_rewrites_the_history() -> None:
    history = [{"role": "user", "content": "why?"}]
    prompt = tokens.render_chat(history)
    answer = tokens.answer(tokens.answer_seed(prompt), 64, reasoning=True)
    stripped = tokens.render_chat([*history, {"role": "assistant", "content": answer.content}])
    assert not stripped.startswith(prompt + answer.tokens)


@given(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), st.integers(0, 1 << 64), st.integers(1, 300))
def test_text_completion_extends_at_whole_tokens(prompt: str, seed: int, count: int) -> None:
    rendered = tokens.render_completion(prompt)
    whole = len(prompt.encode()) // 4 * 4
    assert tokens.render_completion(prompt + tokens.text_of(count, seed))[:whole] == rendered[:whole]


def test_token_ids_are_little_endian() -> None:
    assert tokens.render_completion([1, 0x01020304]) == b"\x01\0\0\0\x04\x03\x02\x01"
    assert tokens.render_completion("abcdef") == b"abcdef\xff\xff"


@given(st.integers(0, 1 << 66), st.integers(0, 5000))
def test_text_is_exact_plain_and_repeatable(seed: int, count: int) -> None:
    text = tokens.text_of(count, seed)
    assert len(text.encode()) == 4 * count
    assert text == tokens.text_of(count, seed)
    assert orjson.dumps(text) == b'"' + text.encode() + b'"'


def test_very_long_text() -> None:
    assert len(tokens.text_of(600_000, 3)) == 2_400_000


def test_answers_differ_by_prompt_and_choice() -> None:
    answers = {tokens.expected_answer(f"p{i:06}".encode(), 8, choice) for i in range(200) for choice in range(2)}
    assert len(answers) == 400


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "valid Unicode"),
        ([{"role": "user", "tool_calls": "x"}], "tool_calls"),
    ],
)
def test_what_is_no_chat_is_refused(chat: Any, words: str) -> None:
    with pytest.raises(tokens.PromptError) as error:
        tokens.render_chat(chat)
    assert words in str(error.value)


@pytest.mark.parametrize("prompt", ["", [], None, [1.5], [-1], ["x"], {"a": 1}])
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(tokens.PromptError):
        tokens.render_completion(prompt)


sequences = st.binary(max_size=700).map(lambda data: data[: len(data) // 4 * 4])


@given(sequences, sequences, st.sampled_from([b"", b"tenant"]), st.integers(1, 20))
def test_a_grown_chain_is_the_fingerprint(first: bytes, second: bytes, seed: bytes, stride: int) -> None:
    chain = Chain(first, stride, seed)
    chain.extend(second)
    whole = fingerprint(first + second, stride=stride, seed=seed)
    assert b"".join(chain.links) == whole.chain
    tail = chain.cut(chain.tokens) if chain.tokens % stride else b""
    assert tail == whole.tail


@given(sequences, sequences, st.integers(0, 200), st.integers(1, 20), st.sampled_from([1, 3]))
def test_verified_prefix_agrees_with_the_connector(
    held: bytes, other: bytes, shared: int, stride: int, factor: int
) -> None:
    prompt = held[: shared * 4] + other
    proof = fingerprint(held, stride=stride * factor)
    assert Chain(prompt, stride).verified_prefix(proof) == verified_prefix(proof, prompt)


def test_exported_fingerprints_use_the_connectors_stride() -> None:
    data = bytes(4 * 140_000)
    exported = Chain(data, 64).fingerprint(16)
    assert exported == fingerprint(data, stride=exported.stride)
    assert exported.stride == 80


def test_seeds_share_nothing() -> None:
    data = bytes(4 * 300)
    assert Chain(data, 64, b"a").verified_prefix(fingerprint(data, stride=64, seed=b"b")) == 0
