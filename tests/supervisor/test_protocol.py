"""The wall between the processes: what is sent is what arrives, and nothing that arrives does harm."""

import ast
import contextlib
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor import protocol
from supervisor.protocol import (
    KINDS,
    VERSION,
    Acquire,
    Call,
    Cancel,
    Message,
    ProtocolError,
    Sampling,
    Stop,
    UnknownKind,
    decode,
    encode,
)


def sample(kind: object) -> object:
    """Some value of a type as the protocol uses them, never the field's default."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return sample(next(a for a in args if a is not type(None)))
    if origin is typing.Literal:
        return args[-1]
    if origin is list:
        return [sample(args[0])]
    if origin is dict:
        return {sample(args[0]): sample(args[1])}
    if kind is object:
        return {"nested": [1, None, "x"]}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return full(kind)
    return {str: "ä\0", int: 2**40, float: 0.25, bool: True, bytes: b"\xff"}[kind]


def full(struct: type[msgspec.Struct]) -> Any:
    fields = typing.get_type_hints(struct)
    return struct(**{name: sample(fields[name]) for name in struct.__struct_fields__})


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.KIND)
def test_every_kind_arrives_as_it_was_sent_with_its_blobs(kind: type[Message]) -> None:
    message = full(kind)
    assert decode(encode(message, [b"one", b""])) == (message, [b"one", b""])


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.KIND)
def test_keys_of_a_later_version_are_ignored(kind: type[Message]) -> None:
    name, body = encode(full(kind))
    widened = msgspec.msgpack.encode({**msgspec.msgpack.decode(body), "from_the_future": [1]})
    assert decode([name, widened])[0] == full(kind)


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.KIND)
def test_a_missing_required_key_is_a_protocol_error_that_names_it(kind: type[Message]) -> None:
    required = [f.name for f in msgspec.structs.fields(kind) if f.required]
    name, body = encode(full(kind))
    for key in required:
        whole = msgspec.msgpack.decode(body)
        del whole[key]
        with pytest.raises(ProtocolError, match=key):
            decode([name, msgspec.msgpack.encode(whole)])


def test_unset_is_not_the_default() -> None:
    asked_for_zero = Sampling(temperature=0.0)
    assert asked_for_zero.temperature == 0.0 and Sampling().temperature is None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked_for_zero)) == {"temperature": 0.0}


def test_an_unknown_kind_says_which() -> None:
    with pytest.raises(UnknownKind) as caught:
        decode([b"teleport", b"\x80"])
    assert caught.value.kind == "teleport"


@pytest.mark.parametrize(
    "frames", [[], [b"stop"], [b"stop", b""], [b"stop", b"\xc1"], [b"stop", b"\x93\x01"], [b"stop", b"\x80"]]
)
def test_what_is_no_message_is_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


def test_a_wrong_type_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="flush_deadline_s"):
        decode([b"stop", msgspec.msgpack.encode({"reason": "r", "flush_deadline_s": "soon"})])


def test_nesting_without_end_is_a_protocol_error_and_not_a_crash() -> None:
    whole = msgspec.msgpack.encode({"kind": "text", "gen": 1, "data_endpoints": []})
    assert whole[0] == 0x83
    bottomless = b"\x84" + whole[1:] + b"\xa8settings\x81\xa1a" + b"\x91" * 200_000 + b"\x01"
    with pytest.raises(ProtocolError):
        decode([b"assign", bottomless])


@given(st.lists(st.binary(max_size=60), max_size=4), st.sampled_from(sorted(KINDS)))
def test_no_bytes_make_it_raise_anything_else(frames: list[bytes], kind: str) -> None:
    for attempt in (frames, [kind.encode(), *frames]):
        with contextlib.suppress(ProtocolError):
            decode(attempt)


@given(st.data())
def test_a_damaged_message_is_read_as_another_or_refused(data: st.DataObject) -> None:
    name, body = encode(full(Acquire))
    at = data.draw(st.integers(0, len(body) - 1))
    damaged = bytearray(body)
    damaged[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode([name, bytes(damaged)])[0], Acquire)


def test_a_call_always_carries_its_version() -> None:
    assert msgspec.msgpack.decode(encode(Call(id="1", verb="status"))[1])["v"] == VERSION


def test_messages_are_small_where_nothing_is_set() -> None:
    assert len(encode(Cancel(epoch="e", rid="r"))[1]) < 20
    assert len(encode(Stop(reason="r", flush_deadline_s=2.0))[1]) < 45


def test_no_field_travels_that_nobody_sets_and_nobody_reads() -> None:
    """The wall promises what is on it. By name alone: a field is called like what it is made from and what becomes of it."""
    root = Path(protocol.__file__).parent.parent
    used: set[str] = set()
    for file in (file for package in ("supervisor", "worker", "gateway") for file in (root / package).glob("*.py")):
        if file.name != "protocol.py":
            nodes = list(ast.walk(ast.parse(file.read_text())))
            used |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
            used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    parts = [
        cls for cls in vars(protocol).values() if isinstance(cls, type) and issubclass(cls, protocol.Part | protocol.Message)
    ]
    assert {f"{cls.__name__}.{name}" for cls in parts for name in cls.__struct_fields__ if name not in used} == set()
