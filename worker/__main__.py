"""`python -P -m worker`: one model, or the text worker; which of the two, the supervisor says in its assignment."""

import os
import sys

import uvloop

from supervisor.child import child_args, settle_in
from worker.link import Link


def main() -> int:
    args = child_args(sys.argv[1:])
    link = Link(args)
    settle_in(args.lifeline_fd, link.orphaned)
    return uvloop.run(link.run())


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not sys.exit: the interpreter would wait for threads that may hang on a device
