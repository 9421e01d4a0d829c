"""What a client may ask, checked before anything is promised, and the error envelope of the OpenAI API."""

from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

MAX_STOPS = 16
INT64 = 1 << 63

DEFAULT_MAX_TOKENS = 16
DEFAULT_TEMPERATURE = 1.0


class ApiError(Exception):
    """One explicit answer to a client: status and envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s = retry_after_s

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


Prompt = str | list[int]


class CompletionBody(BaseModel):
    """The body of /v1/completions. `null` means the default everywhere; fields that nobody here knows are ignored, those
    that would change the answer and are not supported are refused."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    prompt: Any
    max_tokens: Annotated[int, Field(ge=1, lt=INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    n: Any = None
    best_of: Any = None
    suffix: Any = None
    echo: Any = None
    logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    logit_bias: Any = None

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, value: Any) -> Prompt:
        if isinstance(value, list) and value and isinstance(value[0], str | list):
            if len(value) > 1:
                raise ValueError(f"{len(value)} prompts in one request are not supported, send one request for each")
            value = value[0]
        if isinstance(value, list):
            wrong = next((token for token in value if type(token) is not int or token < 0), None)
            if wrong is not None:
                raise ValueError(f"a list must hold token ids, or exactly one prompt; found {_shown(wrong)}")
        elif not isinstance(value, str):
            raise ValueError(f"must be a string or a list of token ids, not {_shown(value)}")
        if not value:
            raise ValueError("is empty")
        prompt: Prompt = value
        return prompt

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, value: Any) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else ([] if value is None else value)
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError(f"must be a string or a list of strings, not {_shown(value)}")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"has {len(stops)} strings, {MAX_STOPS} at most")
        if not all(stops):
            raise ValueError("holds an empty string, which would end every answer before it begins")
        return tuple(stops)

    @field_validator("n", "best_of")
    @classmethod
    def _only_one(cls, value: Any) -> Any:
        if value is not None and (type(value) is not int or value != 1):
            raise ValueError(f"{_shown(value)} is unsupported, only 1")
        return value

    @field_validator("suffix", "echo", "logprobs", "logit_bias")
    @classmethod
    def _absent(cls, value: Any) -> Any:
        # 0 asks for something in logprobs; it is unset elsewhere
        if value is None or value is False or value in ("", {}):
            return None
        raise ValueError(f"{_shown(value)} is unsupported, leave it out")

    @field_validator("presence_penalty", "frequency_penalty")
    @classmethod
    def _neutral(cls, value: Any) -> Any:
        if value is None or (isinstance(value, int | float) and value == 0):
            return None
        raise ValueError(f"{_shown(value)} is unsupported, only 0")


def parse_completion(body: bytes) -> CompletionBody:
    """Raises ApiError 400 with `param` naming the first bad field (None where the body as a whole is bad)."""
    try:
        parsed = CompletionBody.model_validate_json(body)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False)[0]
        where = [str(part) for part in first["loc"]]
        message = first["msg"].removeprefix("Value error, ")
        if not where:
            raise ApiError(400, f"the body must be a JSON object: {message}", code="invalid_json") from None
        code = "missing" if first["type"] == "missing" else "invalid_value"
        if "unsupported" in message:
            code = "unsupported"
        raise ApiError(400, f"{'.'.join(where)}: {message}", param=where[0], code=code) from None
    if parsed.stream_options is not None and not parsed.stream:
        message = "stream_options: only allowed with stream=true"
        raise ApiError(400, message, param="stream_options", code="invalid_value")
    return parsed


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# --- answers ------------------------------------------------------------------------------------------------------------


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: None
    finish_reason: str | None
    token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True):
    """A whole answer, or one chunk of a streamed one."""

    id: str
    created: int
    model: str
    choices: tuple[Choice, ...]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "text_completion"
