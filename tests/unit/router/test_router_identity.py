from __future__ import annotations

from typing import Any

import pytest

from kvtune_router.identity import Identifier, Identity, IdentityError

IDENTIFIER = Identifier(b"secret")


def identity(body: dict[str, Any], **headers: str) -> Identity:
    found = IDENTIFIER.identify({name.replace("_", "-"): value for name, value in headers.items()}, body)
    assert found is not None
    return found


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": content} for role, content in messages]}


def test_headers_win_over_fields_and_ids_are_hashed() -> None:
    by_header = identity({"conversation_id": "b"}, **{"x-session-id": "a"})
    assert by_header.key == identity({}, **{"x-session-id": "a"}).key
    assert by_header.key == identity({}, **{"x-conversation-id": "a"}).key == identity({"session_id": "a"}).key
    assert by_header.key != identity({"conversation_id": "b"}).key
    assert by_header.key is not None and by_header.key != b"a" and len(by_header.key) == 16


def test_ids_belong_to_the_caller_and_to_this_router() -> None:
    mine = identity({"session_id": "a"}, Authorization="Bearer 1")
    assert mine.key != identity({"session_id": "a"}, Authorization="Bearer 2").key
    other = Identifier(b"another").identify({"Authorization": "Bearer 1"}, {"session_id": "a"})
    assert other is not None and other.key != mine.key


@pytest.mark.parametrize("bad", [{"session_id": 7}, {"conversation_id": ""}, {"conversation_id": "x" * 513}])
def test_unusable_ids_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(IdentityError, match=r"session_id|conversation_id"):
        IDENTIFIER.identify({}, bad)


def test_a_chat_continues_the_request_it_repeats() -> None:
    first = identity(chat(("system", "s"), ("user", "hi")))
    second = identity(chat(("system", "s"), ("user", "hi"), ("assistant", "ho"), ("user", "go on")))
    assert first.own is not None
    assert first.own in second.earlier
    assert first.earlier == ()


def test_a_chat_that_only_shares_a_beginning_does_not() -> None:
    first = identity(chat(("system", "s"), ("user", "hi")))
    for other in (
        chat(("system", "s"), ("user", "hi")),
        chat(("system", "s"), ("user", "hi"), ("user", "again")),
        chat(("system", "s"), ("user", "bye"), ("assistant", "ho"), ("user", "go on")),
        {**chat(("system", "s"), ("user", "hi"), ("assistant", "ho"), ("user", "x")), "model": "other"},
    ):
        assert first.own not in identity(other).earlier


@pytest.mark.parametrize("length", [64, 100, 1023, 1024, 5000])
def test_a_prompt_continues_the_text_it_extends(length: int) -> None:
    text = "".join(chr(97 + i * i % 26) for i in range(length))
    first, second = identity({"prompt": text}), identity({"prompt": text + " answer and more"})
    assert first.own is not None
    assert first.index in [mark.hash for mark in second.earlier]
    assert IDENTIFIER.continues(second, first.own)
    assert not IDENTIFIER.continues(identity({"prompt": text[:-1] + "! answer and more"}), first.own)
    assert not IDENTIFIER.continues(identity({"prompt": text}), first.own), "a repetition is no continuation"


def test_token_prompts_work_like_text() -> None:
    first, second = identity({"prompt": list(range(50))}), identity({"prompt": list(range(80))})
    assert first.own is not None and IDENTIFIER.continues(second, first.own)
    assert not IDENTIFIER.continues(identity({"prompt": [*range(49), 500, 7]}), first.own)


@pytest.mark.parametrize("body", [{}, {"prompt": "short"}, {"prompt": ["a", "b"]}, {"messages": []}, {"messages": 7}])
def test_nothing_to_go_by(body: dict[str, Any]) -> None:
    assert IDENTIFIER.identify({}, body) is None
