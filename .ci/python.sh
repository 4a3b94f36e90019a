#!/usr/bin/env bash
# Prints a Python that can run omlxd (3.11 or newer), or says how to get one.
set -u
for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3.14 python3; do
  [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    command -v "$candidate"
    exit 0
  fi
done
cat >&2 <<'TEXT'
omlxd needs Python 3.11 or newer (with its venv module), and none was found on PATH.
  macOS:          brew install python@3.13      (or the installer from python.org)
  Debian, Ubuntu: sudo apt install python3 python3-venv
  anywhere:       uv python install 3.13        (then: make PYTHON=$(uv python find 3.13) demo)
TEXT
exit 1
