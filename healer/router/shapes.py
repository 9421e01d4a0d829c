"""vLLM's answers, taken apart and put together as the client asked for them. Pure.

An undisturbed stream passes as it is, but for the token ids that the client did not ask for. What a continuation says, a
stream of /v1/completions whatever the client called, is put into the form of the stream that it continues.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from healer.router.plan import Kind, Request
from healer.router.transcript import Piece, Transcript

Chunk = dict[str, Any]

ABORT = "abort"
"""The finish_reason of a request that vLLM gave up in a fault. It comes with status 200."""

SEPARATORS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Many clients split at any Unicode line end, and a model may say one."""


class Delta(msgspec.Struct, frozen=True):
    """What one chunk says."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: str | None = None
    stop_reason: Any = None
    prompt: list[int] | None = None
    beyond_text: bool = False
    """It has reasoning or tool calls: a parser stands between the tokens and the text."""
    role_only: bool = False
    """The first chunk of a chat."""


def read_delta(kind: Kind, chunk: Chunk) -> Delta | None:
    """Of a chunk of a stream with one answer; None for one without (usage). Raises ValueError for another shape."""
    try:
        choices = chunk["choices"]
        if not isinstance(choices, list) or not isinstance(chunk.get("usage") or {}, dict):
            raise ValueError("a chunk whose choices are no list, or its usage no object")
        if not choices:
            return None
        choice = choices[0]
        ids = tuple(choice.get("token_ids") or ())
        finish, stop_reason = choice.get("finish_reason"), choice.get("stop_reason")
        if kind is Kind.COMPLETION:
            return _sound(Delta(choice["text"], ids, finish, stop_reason, choice.get("prompt_token_ids")))
        delta = choice["delta"]
        found = Delta(
            text=delta.get("content") or "",
            token_ids=ids,
            finish=finish,
            stop_reason=stop_reason,
            prompt=chunk.get("prompt_token_ids"),
            beyond_text=bool(delta.get("reasoning") or delta.get("tool_calls")),
            role_only="role" in delta and not delta.get("content") and finish is None and not ids,
        )
        if not isinstance(delta.get("reasoning") or "", str):
            raise ValueError("a chunk whose reasoning is no text")
        return _sound(found)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"a chunk without {error}") from None


def _sound(delta: Delta) -> Delta:
    """Raises ValueError for fields of other types than vLLM's."""
    if not isinstance(delta.text, str) or not isinstance(delta.finish or "", str):
        raise ValueError("a chunk whose text or finish_reason is no text")
    if not isinstance(delta.prompt or [], list) or not _whole((*delta.token_ids, *(delta.prompt or ()))):
        raise ValueError("a chunk whose token ids are no whole numbers")
    return delta


def _whole(values: Iterable[object]) -> bool:
    return all(type(value) is int for value in values)


def event(chunk: Chunk) -> bytes:
    body = msgspec.json.encode(chunk)
    for raw, escaped in SEPARATORS:
        if raw in body:
            body = body.replace(raw, escaped)
    return b"data: " + body + b"\n\n"


DONE = b"data: [DONE]\n\n"


class StreamShape:
    """The chunks of one stream to a client, the first rank's and those of the ranks after it."""

    def __init__(self, request: Request, transcript: Transcript) -> None:
        self._request, self._transcript = request, transcript
        self._envelope: Chunk = {}
        self._replayed = False
        self._role_sent = False
        self._prompt_sent = False

    def replayed(self) -> None:
        """From now on chunks come from another rank: their id and counts are not the client's."""
        self._replayed = True

    def chunk(self, kind: Kind, chunk: Chunk, delta: Delta | None, piece: Piece) -> Chunk | None:
        """The client's chunk for one from upstream (of a call of `kind`); None: nothing to send."""
        if not self._envelope:
            self._envelope = {name: chunk.get(name) for name in ("id", "created", "model")}
        if self._replayed:
            chunk |= self._envelope
            if chunk.get("usage"):
                chunk["usage"] |= self._counts()
        if delta is None:
            return chunk if self._request.wants_usage or not self._replayed else None
        if delta.role_only:
            if self._role_sent:
                return None
            self._role_sent = True
            return self._strip(chunk)
        if not (piece.text or piece.token_ids or delta.finish or delta.beyond_text):
            return None
        if kind is not self._request.kind:
            chunk = self._as_chat(chunk, delta)
        return self._strip(self._with_piece(chunk, delta, piece))

    def _with_piece(self, chunk: Chunk, delta: Delta, piece: Piece) -> Chunk:
        choice = chunk["choices"][0]
        if self._request.kind is Kind.COMPLETION:
            choice["text"] = piece.text
        elif piece.text != delta.text or "content" in choice["delta"]:
            choice["delta"]["content"] = piece.text
        choice["token_ids"] = list(piece.token_ids)
        return chunk

    def _as_chat(self, chunk: Chunk, delta: Delta) -> Chunk:
        choice: Chunk = {"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": delta.finish}
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        made = {**self._envelope, "object": "chat.completion.chunk", "choices": [choice]}
        for name in ("usage", "system_fingerprint"):
            if chunk.get(name) is not None:
                made[name] = chunk[name]
        return made

    def _strip(self, chunk: Chunk) -> Chunk:
        """Token ids are there because the router asked; the prompt's are the client's once."""
        choice = chunk["choices"][0]
        wanted = self._request.wants_ids
        if not wanted and "token_ids" in choice:
            choice["token_ids"] = None
        for holder in (choice, chunk):
            if holder.get("prompt_token_ids") is not None:
                if not wanted or self._prompt_sent:
                    holder["prompt_token_ids"] = None
                self._prompt_sent = True
        return chunk

    def _counts(self) -> Chunk:
        return count_usage(self._transcript)


def count_usage(transcript: Transcript) -> Chunk:
    prompt, answered = len(transcript.prompt or ()), len(transcript.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered}


class WholeShape:
    """One whole answer, put together from the stream that brought it."""

    def __init__(self, request: Request, transcript: Transcript) -> None:
        self._request, self._transcript = request, transcript
        self._envelope: Chunk = {}
        self._usage: Chunk = {}
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._finish: Delta = Delta()
        self._role = "assistant"
        self._replayed = False

    def replayed(self) -> None:
        self._replayed = True

    def restarted(self) -> None:
        """All that came is void."""
        self._envelope, self._usage, self._text, self._reasoning = {}, {}, [], []
        self._replayed = False

    def add(self, chunk: Chunk, delta: Delta | None, piece: Piece) -> None:
        if not self._envelope:
            self._envelope = {name: chunk.get(name) for name in ("id", "created", "model")}
        for name in ("system_fingerprint", "metrics", "kv_transfer_params"):
            if chunk.get(name) is not None:
                self._envelope[name] = chunk[name]
        if chunk.get("usage"):
            self._usage = chunk["usage"]
        if delta is None:
            return
        if delta.beyond_text or delta.role_only:
            said = chunk["choices"][0]["delta"]
            self._role = said.get("role") or self._role
            self._reasoning.append(said.get("reasoning") or "")
        self._text.append(piece.text)
        if delta.finish is not None:
            self._finish = delta

    def body(self) -> Chunk:
        """The answer, with the fields that vLLM's has."""
        wanted, transcript = self._request.wants_ids, self._transcript
        usage = {"prompt_tokens_details": None, "completion_tokens_details": None, **self._usage}
        if self._replayed or not self._usage:
            usage |= count_usage(transcript)
        chat = self._request.kind is Kind.CHAT
        text = "".join(self._text)
        choice: Chunk = {"index": 0}
        if chat:
            reasoning = "".join(self._reasoning) or None
            choice["message"] = {
                "role": self._role,
                "content": text if text or reasoning is None else None,
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": reasoning,
            }
        else:
            choice["text"] = text
        choice |= {
            "logprobs": None,
            "finish_reason": self._finish.finish,
            "stop_reason": self._finish.stop_reason,
            "token_ids": transcript.tokens if wanted else None,
            "routed_experts": None,
            "weight_versions": None,
        }
        made: Chunk = {
            **self._envelope,
            "object": "chat.completion" if chat else "text_completion",
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": self._envelope.get("system_fingerprint"),
            "usage": usage,
            "kv_transfer_params": self._envelope.get("kv_transfer_params"),
            "ec_transfer_params": None,
            "metrics": self._envelope.get("metrics"),
        }
        prompt = transcript.prompt if wanted else None
        if chat:
            made |= {"prompt_logprobs": None, "prompt_token_ids": prompt, "prompt_text": None}
        else:
            choice |= {"prompt_logprobs": None, "prompt_token_ids": prompt}
        return made
