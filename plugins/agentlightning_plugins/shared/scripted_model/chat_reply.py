"""Scripted answers in the format of OpenAI's Chat Completions, Completions and Embeddings."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from agentlightning_plugins.shared.scripted_model.script import (
    EOS,
    Answer,
    cut,
    decode,
    encode,
    logprob,
    render_prompt,
    to_text,
)


class ChatReply:
    """One answer, whole or in chunks."""

    def __init__(self, body: Mapping[str, Any], answer: Answer, reply_id: str, *, give_ids: bool) -> None:
        self._body, self._answer, self._id = body, answer, reply_id
        self._is_chat = "messages" in body
        self._ids = give_ids and bool(body.get("return_token_ids"))
        asked = body.get("logprobs")
        self._logprobs = bool(asked) if self._is_chat else asked is not None
        self._prompt_ids = encode(render_prompt(body))
        self._reason = answer.finish_reason or ("tool_calls" if answer.tool_calls else "stop")

    def whole(self) -> dict[str, Any]:
        """Returns the answer to a request without ``stream``."""
        choices, count = [], 0
        for index in range(self._body.get("n") or 1):
            tokens = [token for piece in self._pieces(index) for token in piece[1]]
            count += len(tokens)
            choice = self._choice(index, tokens, self._reason)
            if self._is_chat:
                calls = self._tool_calls(index)
                answer = self._answer
                message = {"role": "assistant", "content": answer.text(index), "refusal": answer.refusal}
                reasoning = {} if answer.reasoning is None else {"reasoning_content": answer.reasoning}
                choice["message"] = {**message, **reasoning, **({"tool_calls": calls} if calls else {})}
            else:
                choice["text"] = self._answer.text(index) or ""
            choices.append(choice)
        return self._envelope("", choices) | {"usage": self._usage(count)}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yields the chunks of a stream; the first has the role, and the last the finish reason."""
        first, count = True, 0
        for index in range(self._body.get("n") or 1):
            for delta, tokens, last in self._pieces(index):
                count += len(tokens)
                choice = self._choice(index, tokens, self._reason if last else None)
                if not self._is_chat:
                    choice["text"] = delta.get("content", "")
                else:
                    choice["delta"] = {"role": "assistant", **delta} if first else delta
                chunk = self._envelope(".chunk", [choice])
                for each in () if first else (chunk, choice):
                    each.pop("prompt_token_ids", None)
                yield chunk
                first = False
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield self._envelope(".chunk", []) | {"usage": self._usage(count)}

    def _tool_calls(self, index: int) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call-{self._id}-{index}-{position}",
                "type": "function",
                "function": {"name": name, "arguments": to_text(arguments)},
            }
            for position, (name, arguments) in enumerate(self._answer.tool_calls)
        ]

    def _pieces(self, index: int) -> Iterator[tuple[dict[str, Any], list[int], bool]]:
        """Yields delta, tokens and whether it is the last, for each chunk of one choice."""
        answer = self._answer
        texts = {"reasoning_content": answer.reasoning, "content": answer.text(index), "refusal": answer.refusal}
        for key, text in texts.items():
            for piece in cut(text or ""):
                yield {key: piece}, encode(piece), False
        for position, call in enumerate(self._tool_calls(index)):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            head = {**call, "index": position, "function": {"name": name, "arguments": ""}}
            yield {"tool_calls": [head]}, encode(f"<tool_call>{name}"), False
            for piece in cut(arguments):
                yield {"tool_calls": [{"index": position, "function": {"arguments": piece}}]}, encode(piece), False
        yield {}, [EOS], True

    def _choice(self, index: int, tokens: list[int], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
        if self._ids:
            choice["token_ids"] = tokens
            if not self._is_chat:
                choice["prompt_token_ids"] = self._prompt_ids
        if self._logprobs:
            texts, values = [decode([t]) if t < 128 else "" for t in tokens], [logprob(t) for t in tokens]
            choice["logprobs"] = (
                {"content": [_chat_logprob(text, value) for text, value in zip(texts, values, strict=True)]}
                if self._is_chat
                else {"tokens": texts, "token_logprobs": values, "text_offset": [], "top_logprobs": None}
            )
        return choice

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = f"chat.completion{kind}" if self._is_chat else "text_completion"
        envelope: dict[str, Any] = {
            "id": self._id,
            "object": name,
            "created": int(time.time()),
            "model": self._body.get("model"),
            "choices": choices,
        }
        if self._ids and self._is_chat:
            envelope["prompt_token_ids"] = self._prompt_ids
        return envelope | dict(self._answer.extra)

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        prompt, total = len(self._prompt_ids), len(self._prompt_ids) + completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": total}


def _chat_logprob(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}


def embed(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an answer of Embeddings: the vector of a text is its length and its first token."""
    texts = [body["input"]] if isinstance(body["input"], str) else body["input"]
    data = [
        {"object": "embedding", "index": index, "embedding": [float(len(text)), float(encode(text)[0])]}
        for index, text in enumerate(texts)
    ]
    count = sum(len(encode(text)) for text in texts)
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "data": data, "model": body["model"], "usage": usage}
