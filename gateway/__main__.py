"""The gateway process: `python -P -m gateway …`, started by the supervisor with a listening socket.

Order: report for duty, bind data.sock, wait for the first snapshot, then serve HTTP. It ends by a `stop` message or SIGTERM, or
at once when the supervisor is gone: connections are cut then, so no client takes it for the end of an answer.
"""

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop
import zmq
from aiohttp import web

from gateway.app import make_app
from gateway.control import Control
from gateway.desk import Desk
from gateway.http_log import quiet_server_log
from gateway.in_hand import InHand
from gateway.link import Link
from gateway.presence import Presence
from gateway.records import Records
from gateway.tallies import Tallies
from gateway.workers import Workers
from supervisor.child import ChildArgs, child_args, settle_in

START_LIMIT_S = 30.0
SHUTDOWN_TIMEOUT_S = 2.0
"""aiohttp applies it twice."""
BEAT_EVERY_S = 1.0
YOUNG_OBJECTS = 10_000
"""Before Python looks for cycles among them. Rows and pieces are many, live for a moment and hold none: looking at every 700
objects, and at all modules now and then, was 6 % of what a token costs.
"""

OPEN_FILES = 10_240
"""Each client is one. A terminal of macOS allows 256, and from there on libuv takes connections only to close them at once."""

log = logging.getLogger("gateway")


async def run(args: ChildArgs, http: socket.socket) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    tallies = Tallies()
    records = Records(tallies.add)
    control = Control(args, context, records)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, control.stopped.set)
    async with asyncio.timeout(START_LIMIT_S):
        assign = await control.assigned()
        workers = Workers(Path(assign.data_endpoints[0].removeprefix("ipc://")), context)
        link = Link(control, workers, records)
        await control.watch(link)
    in_hand = InHand(records, control.beat)
    presence = Presence()
    runner = web.AppRunner(
        make_app(Desk(control, link, records, tallies), presence),
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        access_log=None,
        auto_decompress=False,
    )
    await runner.setup()
    await web.SockSite(runner, http, backlog=1024).start()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    log.info("serving as %s", args.identity)
    background = [asyncio.create_task(presence.probe_forever()), asyncio.create_task(_beat(in_hand))]
    await control.stopped.wait()
    log.info("stopping")
    await _end(runner, link)
    records.close()
    for task in background:
        task.cancel()
    workers.close()
    control.close()
    context.term()


async def _beat(in_hand: InHand) -> None:
    while True:
        in_hand.say()
        await asyncio.sleep(BEAT_EVERY_S)


async def _end(runner: web.AppRunner, link: Link) -> None:
    """Every stream gets its error event before connections are closed."""
    for site in list(runner.sites):
        await site.stop()
    link.shut()
    await runner.cleanup()


def make_room_for_clients() -> None:
    """As far as the system lets us without asking; where it does not, what there is has to do."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def main(argv: Sequence[str]) -> None:
    args = child_args(argv)
    if args.http_fd is None:
        sys.exit("--http-fd is missing")
    settle_in(args.lifeline_fd, lambda: os._exit(1))
    quiet_server_log()
    make_room_for_clients()
    os.set_inheritable(args.http_fd, False)
    uvloop.run(run(args, socket.socket(fileno=args.http_fd)))


if __name__ == "__main__":
    main(sys.argv[1:])
