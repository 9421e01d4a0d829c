"""What a request asks for, whether its answer can be continued on another rank, and the request that does so. Pure.

An answer can be continued when its next token depends on the tokens before it only: then prompt and answer so far are a
prompt like any other. A request with a field that is not known here to be of that kind is not continued.
"""

from enum import StrEnum
from typing import Any

import msgspec

from elastic.gateway.schema import INT64
from healer.router.foreign import UNREADABLE

Body = dict[str, Any]


class Kind(StrEnum):
    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


DEFAULT_MAX_TOKENS = 16
"""Of /v1/completions; a chat without a limit goes on to the end of the context."""

CARRIED = frozenset(
    [
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "logit_bias",
        "allowed_token_ids",
        "user",
        "priority",
        "session_id",
        "cache_salt",
        "stream_interval",
    ]
)
"""Mean the same for a continuation. repetition_penalty: vLLM counts prompt and answer alike."""

CHANGED = frozenset(["stream", "stream_options", "return_token_ids", "seed", "max_tokens", "min_tokens", "request_id"])
"""Are set anew for a continuation."""

OF_THE_PROMPT = {
    Kind.COMPLETION: frozenset(["prompt", "add_special_tokens", "truncate_prompt_tokens", "truncation_side"]),
    Kind.CHAT: frozenset(
        [
            "messages",
            "max_completion_tokens",
            "add_special_tokens",
            "truncate_prompt_tokens",
            "truncation_side",
            "add_generation_prompt",
            "continue_final_message",
            "chat_template",
            "chat_template_kwargs",
            "documents",
            "include_reasoning",
            "reasoning_effort",
            "parallel_tool_calls",
        ]
    ),
}
"""Have done their work when the prompt's tokens are known."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "length_penalty": (1,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Values that ask for nothing, beside those that are empty."""

NOT_EMPTY_AT_ZERO = frozenset({"logprobs", "prompt_logprobs", "thinking_token_budget"})
"""Ask for something even with 0."""


class Request(msgspec.Struct, frozen=True):
    kind: Kind
    body: Body
    raw: bytes
    """As the client sent it."""
    stream: bool
    obstacle: str
    """Why the answer cannot be continued; empty: it can."""
    stops: tuple[str, ...] = ()
    max_tokens: int | None = None
    """None: as much as the context holds."""

    @property
    def wants_ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))

    @property
    def wants_usage(self) -> bool:
        return _usage_wanted(self.body)

    @property
    def reproducible(self) -> bool:
        """A sampled request with a seed: only a run from the start gives the answer that the seed promises."""
        return self.body.get("seed") is not None and self.body.get("temperature") != 0


def read_request(kind: Kind, raw: bytes) -> Request:
    """A body that vLLM will refuse is no error here: it is passed on, and the refusal back."""
    try:
        body = msgspec.json.decode(raw)
    except UNREADABLE:
        body = None
    if not isinstance(body, dict):
        return Request(kind, {}, raw, False, "the body is no JSON object")
    stream = body.get("stream") is True
    obstacle = find_obstacle(kind, body)
    if obstacle:
        return Request(kind, body, raw, stream, obstacle)
    stop = body.get("stop")
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    limit = body.get("max_tokens")
    if kind is Kind.CHAT and body.get("max_completion_tokens") is not None:
        limit = body["max_completion_tokens"]
    if limit is None and kind is Kind.COMPLETION:
        limit = DEFAULT_MAX_TOKENS
    return Request(kind, body, raw, stream, "", stops, limit)


def find_obstacle(kind: Kind, body: Body) -> str:
    """The first reason why an answer could not be continued; empty where it can."""
    known = CARRIED | CHANGED | OF_THE_PROMPT[kind]
    for name, value in body.items():
        if name not in known and not _asks_nothing(name, value):
            return f"the request has {name!r}"
    for name in ("max_tokens", "max_completion_tokens", "min_tokens", "seed"):
        if body.get(name) is not None and type(body[name]) is not int:
            return f"{name!r} is no whole number"
    stop = body.get("stop")
    if not (
        stop is None or isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(s, str) for s in stop))
    ):
        return "'stop' is neither a string nor a list of strings"
    return _prompt_obstacle(body.get("prompt")) if kind is Kind.COMPLETION else _messages_obstacle(body.get("messages"))


def _asks_nothing(name: str, value: object) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return True
    if name in NOT_EMPTY_AT_ZERO:
        return False
    return value == 0 or (value is not True and value in NEUTRAL.get(name, ()))


def _prompt_obstacle(prompt: object) -> str:
    if isinstance(prompt, str) and prompt:
        return ""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        return _prompt_obstacle(prompt[0])
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return ""
    return "the request has not exactly one prompt"


def _messages_obstacle(messages: object) -> str:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return "'messages' is no list of objects"
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and any(
            not isinstance(part, dict) or part.get("type") not in ("text", "input_text") for part in content
        ):
            return "a message holds something else than text"
    return ""


def _usage_wanted(body: Body) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def first_body(request: Request) -> bytes:
    """What is sent upstream for an answer from its start. One that can be continued is streamed, whatever the client
    wants, since the tokens of a whole answer are lost with the rank."""
    if request.obstacle:
        return request.raw
    body = {**request.body, "stream": True, "return_token_ids": True}
    if not request.stream:
        body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


def continued_body(request: Request, prompt: list[int], answered: list[int], *, max_tokens: int, attempt: int) -> bytes:
    """What is sent to /v1/completions for the rest of an answer. `max_tokens`: of the rest."""
    body: Body = {name: value for name, value in request.body.items() if name in CARRIED and value is not None}
    body |= {
        "prompt": [*prompt, *answered],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if (least := request.body.get("min_tokens")) is not None:
        body["min_tokens"] = max(0, least - len(answered))
    if (seed := request.body.get("seed")) is not None:
        # with the same seed the rest would be drawn with the random numbers of the start
        body["seed"] = (seed + len(answered)) % INT64
    if (name := request.body.get("request_id")) is not None:
        body["request_id"] = f"{name}-{attempt}"
    return msgspec.json.encode(body)
