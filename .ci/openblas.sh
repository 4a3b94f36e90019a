#!/usr/bin/env bash
# Installs Debian's OpenBLAS when that is possible without asking; says what follows when it is not. Always exits 0.
set -u
[ "$(uname -s)" = Linux ] || exit 0
ldconfig -p 2>/dev/null | grep -q 'libopenblas' && exit 0
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
  echo "installing libopenblas0-pthread (MLX's CPU build is about 30 times slower without it)"
  { apt-get install -y -qq libopenblas0-pthread || { apt-get update -qq && apt-get install -y -qq libopenblas0-pthread; }; } >/dev/null 2>&1 && exit 0
fi
echo "OpenBLAS is not installed: CPU inference will be slow and the tests marked 'real' are left out." >&2
echo "  Debian, Ubuntu: sudo apt install libopenblas0-pthread" >&2
exit 0
