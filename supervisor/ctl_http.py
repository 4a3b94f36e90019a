"""The gateway's OpenAI dialect as omlxctl speaks it: the list of models, and a chat answer as it streams."""

import http.client
import json
import urllib.parse
from collections.abc import Generator, Mapping
from typing import cast

from supervisor.ctl_exit import CommandFailed, Exit, status_of_code

CONNECT_S = 5.0
SILENCE_S = 600.0
"""The server sends keep-alives while it works; this is for one that died without closing."""

Message = dict[str, str]


class Gateway:
    """One server by its address. Every problem comes out as `CommandFailed` with the server's own words."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url` may end in /v1, as OpenAI clients are given it."""
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CommandFailed(f"{url} is no http address", Exit.USAGE)
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def models(self) -> list[str]:
        connection, response = self._request("GET", "/v1/models", None)
        try:
            document = cast("dict[str, list[dict[str, str]]]", json.loads(response.read()))
            return [model["id"] for model in document["data"]]
        except (ValueError, KeyError, TypeError) as e:
            raise CommandFailed(f"{self.url} is no OpenAI-compatible server: its list of models cannot be read") from e
        finally:
            connection.close()

    def stream_chat(self, model: str, messages: list[Message]) -> Generator[str, None, None]:
        """The answer's text in pieces. Closing the generator closes the connection."""
        body = {"model": model, "messages": messages, "stream": True}
        connection, response = self._request("POST", "/v1/chat/completions", body)
        try:
            for data in self._events(response):
                if data == "[DONE]":
                    return
                yield _text_of(data)
            raise CommandFailed("the connection ended before the answer did")
        except (OSError, http.client.HTTPException) as e:
            raise CommandFailed(f"the connection to {self.url} was lost before the answer ended: {e}") from e
        finally:
            response.close()
            connection.close()

    @staticmethod
    def _events(response: http.client.HTTPResponse) -> Generator[str, None, None]:
        while line := response.readline():
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8", "replace")

    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_S)
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_S)
            connection.request(method, self._prefix + path, json.dumps(body) if body else None, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as e:
            connection.close()
            raise CommandFailed(
                f"no server answers at {self.url} ({e}); start one with: omlxctl serve", Exit.NOT_RUNNING
            ) from e
        if response.status != http.client.OK:
            problem = _problem_of(response.read(), response.status)
            connection.close()
            raise problem
        return connection, response


def _text_of(data: str) -> str:
    """One chunk's text; raises `CommandFailed` for an error event."""
    try:
        chunk = cast("dict[str, object]", json.loads(data))
    except ValueError as e:
        raise CommandFailed(f"the server sent something that is no JSON: {data[:200]}") from e
    if "error" in chunk:
        raise _problem_of(data.encode(), 0)
    choices = cast("list[dict[str, dict[str, str | None]]]", chunk.get("choices") or [])
    return "".join(choice.get("delta", {}).get("content") or "" for choice in choices)


def _problem_of(body: bytes, status: int) -> CommandFailed:
    try:
        error = cast("dict[str, object]", json.loads(body)["error"])
        code, message = str(error.get("code") or error.get("type") or ""), str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        code, message = "", f"the server answered {status}: {body[:300].decode('utf-8', 'replace').strip()}"
    if status in (401, 403):
        return CommandFailed(f"{message} (give the key with --api-key)", Exit.REFUSED)
    if status == 404:
        return CommandFailed(message, Exit.NOT_FOUND)
    return CommandFailed(message, status_of_code(code), code=code)
