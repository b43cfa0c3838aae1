"""The smallest coding agent: one tool, the shell. The task is on stdin; nothing in this file is about training.

It speaks with its model as mini-swe-agent does, without the instructions: the same tool, the same form of results.
"""

import http.client
import json
import os
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

MAX_CALLS = 6
SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOL = {"name": "bash", "description": "Execute a bash command", "parameters": SCHEMA}
SYSTEM = "You are a helpful assistant that can interact with a computer."


def ask(messages: list[dict[str, Any]]) -> Any:
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    body = {
        "model": os.environ["OPENAI_MODEL"],
        "messages": messages,
        "tools": [{"type": "function", "function": TOOL}],
    }
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection = kind(url.netloc)
    connection.request("POST", url.path + "/chat/completions", json.dumps(body), headers)
    answer = json.load(connection.getresponse())
    return answer["choices"][0]["message"] if "choices" in answer else sys.exit(json.dumps(answer))


def execute(call: Any) -> str:
    try:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, stdout=-1, stderr=-2, text=True, timeout=30, check=False)  # noqa: S602 its tool
    except (ValueError, KeyError, TypeError, subprocess.TimeoutExpired) as error:
        return f"error: {error}"
    if done.stdout.startswith(SUBMIT) and done.returncode == 0:
        sys.exit()
    return f'{{\n  "returncode": {done.returncode},\n  "output": {json.dumps(done.stdout[:9999])}\n}}'


def main() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": sys.stdin.read()},
    ]
    for _ in range(MAX_CALLS):
        message = ask(messages)
        messages.append({"role": "assistant", "content": message["content"], "tool_calls": message.get("tool_calls")})
        for call in message.get("tool_calls") or sys.exit():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": execute(call)})


if __name__ == "__main__":
    main()
