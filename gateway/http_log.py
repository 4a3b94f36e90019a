"""What aiohttp's server may write into the log about a request it could not serve: one line, and nothing the client sent.

Left alone it logs a stack for every client that leaves between two writes, and for a malformed request the bytes it stumbled
over: a key or a prompt.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError

SERVER_LOG = "aiohttp.server"


def quiet_server_log() -> None:
    logging.getLogger(SERVER_LOG).addFilter(_fit_to_log)


def _fit_to_log(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ConnectionError):
        return False  # the client has left, and its request was ended for it
    if isinstance(error, HttpProcessingError):
        record.msg, record.args = f"{record.getMessage()}: {type(error).__name__}, answered with {error.code}", None
        record.exc_info = record.exc_text = None
    return True
