"""Recorded conversations, and the turns planned from them for a model with a limited context. Pure but for reading."""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

COLUMNS = ("conv", "turn", "in_tokens", "out_tokens", "gap_to_next_s", "reusable_tokens_next")
"""The columns a trace must have; others are ignored. Described in `bench/data/README.md`."""
CHAT_COLUMNS = ("dur", "event", "w", "t")
"""Of a recording of requests: seconds to the first continuation (or to the end), whether it came, tokens, arrival."""
_VALUES = (int, float, str)
"""What JSON values of a turn may be."""
_CHAT_OUTPUT = 350
"""Tokens of an answer, where a recording tells only prompt and answer together."""
_CHAT_TOKEN_S = 0.016
"""Seconds a token of such an answer takes: recorded pauses run from arrival to arrival."""
SAMPLE = "agent_sample.csv.gz"
"""The packaged trace: 100 coding-agent conversations (`data/README.md` says whence)."""
COMPACTED_SHARE = 0.2
"""Of the context limit: how long the prompt is after an agent compacted its history."""
MIN_NEW_TOKENS = 16
"""A planned turn adds at least this much text: a message's header and a few words."""


class TraceError(ValueError):
    """A trace that cannot be used. The message says what is wrong, in which line, and what to do about it."""


@dataclass(frozen=True, slots=True)
class TraceTurn:
    """One recorded model call."""

    prompt_tokens: int
    output_tokens: int
    gap_s: float | None
    """Pause from the end of this answer to the next turn (s); None: the conversation never returns."""
    reusable_next: int
    """How many leading tokens of this turn's prompt and answer the next prompt begins with; 0 on the last turn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One recorded conversation; at least one turn, and only the last one has no pause after it."""

    id: int
    """The recorded number; where a file has names for conversations, their place in it."""
    turns: tuple[TraceTurn, ...]


@dataclass(frozen=True, slots=True)
class PlannedTurn:
    """One turn to play. `prompt_tokens == keep_tokens + new_tokens`."""

    prompt_tokens: int
    output_tokens: int
    keep_tokens: int
    """Leading tokens of the previous turn's sequence (its prompt and answer) that this prompt begins with."""
    new_tokens: int
    """Tokens after those: what no earlier turn has shown the engines."""
    gap_s: float | None
    """Pause after the answer (s); None: never returns."""
    rewritten: bool
    """The prompt keeps less than the whole previous sequence (False on a first turn)."""
    compacted: bool
    """The history was replaced because it would have outgrown the model's context."""

    @property
    def sequence_tokens(self) -> int:
        """Prompt and answer together: what the decode engine holds when the turn ends."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """A conversation's turns, fitted to a model."""

    id: int
    """The recorded conversation's id."""
    turns: tuple[PlannedTurn, ...]


def load_trace(path: str | Path | None = None) -> list[Conversation]:
    """Read conversations from a file; None reads the packaged sample.

    `.csv` with `COLUMNS`, or with `CHAT_COLUMNS` (times between requests of a chat service, which are linked to
    conversations by their times); `.jsonl` with one turn a line, an object with `COLUMNS`. Each may be gzipped (`.gz`).
    `conv` is a number or a name; all else are numbers. Rows of a conversation must be together and in order. Raises
    TraceError for a missing or unreadable file, missing columns, and values that are no usable numbers.
    """
    if path is None:
        source = resources.files("kvtune_bench").joinpath("data", SAMPLE)
        with resources.as_file(source) as packaged:
            return _load(packaged)
    return _load(Path(path))


def _load(path: Path) -> list[Conversation]:
    if not path.is_file():
        raise TraceError(f"{path}: no such file; give a .csv, .csv.gz or .jsonl trace, or none for the packaged sample")
    parse = _parse_lines if ".jsonl" in path.suffixes or ".ndjson" in path.suffixes else _parse_table
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", newline="") as stream:
                return parse(path, stream)
        with path.open(encoding="utf-8", newline="") as stream:
            return parse(path, stream)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read ({error}); is it a gzip file or plain text?") from error


def _parse_lines(path: Path, lines: Iterable[str]) -> list[Conversation]:
    def rows() -> Iterator[tuple[str, list[str]]]:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise TraceError(f"{where}: not JSON ({error}); one object a line is expected") from None
            except RecursionError:
                raise TraceError(f"{where}: nested too deeply; one object a line is expected") from None
            if not isinstance(row, dict):
                raise TraceError(f"{where}: not an object; expected one with {', '.join(COLUMNS)}")
            missing = [name for name in COLUMNS if name not in row]
            if missing:
                raise TraceError(f"{where}: {', '.join(missing)} missing; a turn has {', '.join(COLUMNS)}")
            for name in COLUMNS:
                if row[name] is not None and (isinstance(row[name], bool) or not isinstance(row[name], _VALUES)):
                    allowed = "a number or a string" if name == "conv" else "a number"
                    raise TraceError(f"{where}: {name} is {json.dumps(row[name])[:60]}, expected {allowed}")
            yield where, ["" if row[name] is None else str(row[name]) for name in COLUMNS]

    return _conversations(path, rows())


def _parse_table(path: Path, lines: Iterable[str]) -> list[Conversation]:
    reader = csv.reader(lines)
    header = next(reader, None)
    if header is None:
        raise TraceError(f"{path}: the file is empty; expected a header line with {', '.join(COLUMNS)}")
    chat = all(name in header for name in CHAT_COLUMNS)
    wanted = CHAT_COLUMNS if chat else COLUMNS
    missing = [name for name in wanted if name not in header]
    if missing:
        raise TraceError(
            f"{path}, line 1: column {', '.join(missing)} missing; a trace has {', '.join(COLUMNS)} "
            f"(found: {', '.join(header)[:200]})"
        )
    columns = [header.index(name) for name in wanted]

    def rows() -> Iterator[tuple[str, list[str]]]:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if not row:
                continue
            if len(row) != len(header):
                raise TraceError(f"{where}: {len(row)} values for {len(header)} columns; is the file cut off?")
            yield where, [row[index] for index in columns]

    return _linked(path, rows()) if chat else _conversations(path, rows())


def _conversations(path: Path, rows: Iterable[tuple[str, list[str]]]) -> list[Conversation]:
    found: dict[str, list[TraceTurn]] = {}
    current: str | None = None
    expected_turn = -1
    for where, (conv, turn, prompt, output, gap, reusable) in rows:
        conversation = _label(conv, where)
        number = _whole(turn, "turn", where)
        if conversation != current:
            if conversation in found:
                raise TraceError(f"{where}: conversation {conversation} is in two places; sort the file by conv, turn")
            _closed(found, current, where)
            found[conversation] = []
            current, expected_turn = conversation, number
        if number != expected_turn:
            raise TraceError(f"{where}: turn {number} where {expected_turn} should follow; sort the file by conv, turn")
        expected_turn += 1
        turns = found[conversation]
        if turns and turns[-1].gap_s is None:
            raise TraceError(f"{where}: a turn follows one whose gap_to_next_s is empty, which means never returns")
        recorded = TraceTurn(
            prompt_tokens=_whole(prompt, "in_tokens", where, least=1),
            output_tokens=_whole(output, "out_tokens", where),
            gap_s=None if gap == "" else _real(gap, "gap_to_next_s", where),
            reusable_next=_whole(reusable or "0", "reusable_tokens_next", where),
        )
        if recorded.reusable_next > recorded.prompt_tokens + recorded.output_tokens:
            raise TraceError(f"{where}: reusable_tokens_next is {reusable}, more than in_tokens + out_tokens")
        turns.append(recorded)
    if not found:
        raise TraceError(f"{path}: it has no turns")
    _closed(found, current, str(path))
    try:
        ids = [int(label) for label in found]
    except ValueError:
        ids = list(range(len(found)))
    return [Conversation(which, tuple(turns)) for which, turns in zip(ids, found.values(), strict=True)]


def _label(text: str, where: str) -> str:
    """What a conversation is called; whole numbers in one way of writing."""
    label = text.strip()
    if not label:
        raise TraceError(f"{where}: conv is empty; name the conversation, with a number or a string")
    for read in (int, _of_float):
        try:
            return str(read(label))
        except (ValueError, OverflowError):
            continue
    return label


def _of_float(text: str) -> int:
    """`7.0` as 7. Raises ValueError or OverflowError for what is no whole number."""
    value = float(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request of a chat service."""

    arrival_s: float
    tokens: int
    """Prompt and answer together."""
    until_next_s: float | None
    """To the arrival of its continuation; None: none came."""


def _linked(path: Path, rows: Iterable[tuple[str, list[str]]]) -> list[Conversation]:
    """Conversations from a chat service's requests, each with the time to its first continuation, if there was one.

    A continuation arrives then and is the shortest request of that time, not yet linked, that is no shorter than what
    it goes on from. Conversations that began in the first half of the recording are kept: whether they go on was seen
    for all of them.
    """
    requests: list[_Request] = []
    for where, (duration, event, weight, arrival) in rows:
        if event.lower() not in ("true", "false", "1", "0"):
            raise TraceError(f"{where}: event is {event!r}, expected True or False")
        went_on = event.lower() in ("true", "1")
        requests.append(
            _Request(
                _real(arrival, "t", where),
                _whole(weight, "w", where, least=2),
                _real(duration, "dur", where) if went_on else None,
            )
        )
    if not requests:
        raise TraceError(f"{path}: it has no turns")
    requests.sort(key=lambda one: (one.arrival_s, one.tokens))
    at: dict[int, list[int]] = {}
    for index, one in enumerate(requests):
        at.setdefault(round(one.arrival_s), []).append(index)
    follows: dict[int, int] = {}
    taken: set[int] = set()
    for index, one in enumerate(requests):
        if one.until_next_s is None:
            continue
        when = round(one.arrival_s + one.until_next_s)
        for near in (0, -1, 1, -2, 2, -3, 3):
            later = (i for i in at.get(when + near, ()) if i > index and i not in taken)
            found = next((i for i in later if requests[i].tokens >= one.tokens), None)
            if found is not None:
                follows[index] = found
                taken.add(found)
                break
    half = requests[-1].arrival_s / 2
    conversations = []
    for index, first in enumerate(requests):
        if index in taken or first.arrival_s > half:
            continue
        chain = [index]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        turns = []
        for here, after in zip(chain, [*chain[1:], None], strict=True):
            this = requests[here]
            output = max(1, min(_CHAT_OUTPUT, this.tokens // 2))
            gap = None
            if after is not None:
                gap = max(0.0, requests[after].arrival_s - this.arrival_s - output * _CHAT_TOKEN_S)
            turns.append(TraceTurn(this.tokens - output, output, gap, 0 if after is None else this.tokens))
        conversations.append(Conversation(index, tuple(turns)))
    return conversations


def _closed(found: dict[str, list[TraceTurn]], conversation: str | None, where: str) -> None:
    """A trace cut off inside a conversation would make its last pause look like one that ended."""
    if conversation is not None and found[conversation][-1].gap_s is not None:
        raise TraceError(
            f"{where}: conversation {conversation} ends with a gap_to_next_s, yet no turn follows; "
            "leave it empty where a conversation never returns"
        )


def _real(text: str, column: str, where: str, least: float = 0.0) -> float:
    try:
        value = float(text)
    except ValueError:
        raise TraceError(f"{where}: {column} is {text!r}, not a number") from None
    if not math.isfinite(value) or value < least:
        raise TraceError(f"{where}: {column} is {text}, expected a number of at least {least:g}")
    return value


def _whole(text: str, column: str, where: str, least: int = 0) -> int:
    value = _real(text, column, where, least)
    if value != int(value):
        raise TraceError(f"{where}: {column} is {text}, not a whole number")
    return int(value)


def plan(
    conversations: Sequence[Conversation],
    *,
    context_limit: int,
    compacted_share: float = COMPACTED_SHARE,
    min_new_tokens: int = MIN_NEW_TOKENS,
) -> list[Plan]:
    """Fit recorded conversations to a model that takes `context_limit` tokens, prompt and answer together.

    Where a turn would not fit, the agent *compacts*: the history is replaced by a fresh prompt of `compacted_share` of
    the limit, of which nothing is reusable, and the prompts after it are shorter by as many tokens as were dropped. So
    the number of turns, the pauses and the growth per turn stay those of the recording; only the depth differs.

    A recorded rewrite (`reusable_next` below prompt + answer) stays one: the next prompt keeps that prefix and goes on
    with new text. One that reaches back before a compaction ends its effect: nothing is kept and the prompt takes its
    recorded length again. Answers have 1 token at least and half the limit at most; every turn adds at least
    `min_new_tokens`, taken from what it keeps where the recording adds less.

    Raises ValueError for a limit too small to hold a compacted prompt and an answer.
    """
    fresh = int(context_limit * compacted_share)
    if not 0 < compacted_share <= 0.5 or fresh < 2 * min_new_tokens:
        raise ValueError(
            f"context limit {context_limit} with a compacted share of {compacted_share} leaves prompts of {fresh} "
            f"tokens; at least {2 * min_new_tokens} are needed, and a share of at most 0.5"
        )
    return [
        Plan(
            conversation.id,
            tuple(_plan_turns(conversation.turns, context_limit, fresh, min_new_tokens)),
        )
        for conversation in conversations
    ]


def _plan_turns(turns: Sequence[TraceTurn], limit: int, fresh: int, min_new: int) -> Iterator[PlannedTurn]:
    dropped = 0
    """Tokens of the recording's history that compactions have removed."""
    before: TraceTurn | None = None
    held = 0
    """Tokens of the planned sequence so far."""
    for turn in turns:
        output = min(max(1, turn.output_tokens), limit // 2)
        keep = 0
        if before is not None:
            # Never more than is held: an answer cut to half the limit is shorter than the recorded one.
            keep = max(0, min(before.reusable_next - dropped, held))
            if keep == 0:
                dropped = 0
        prompt = max(turn.prompt_tokens - dropped, 2 * min_new)
        compacted = prompt + output > limit
        if compacted:
            prompt, keep = fresh, 0
            dropped = max(0, turn.prompt_tokens - fresh)
        keep = max(0, min(keep, prompt - min_new))
        yield PlannedTurn(
            prompt_tokens=prompt,
            output_tokens=output,
            keep_tokens=keep,
            new_tokens=prompt - keep,
            gap_s=turn.gap_s,
            rewritten=before is not None and keep < held,
            compacted=compacted and before is not None,
        )
        before, held = turn, prompt + output
